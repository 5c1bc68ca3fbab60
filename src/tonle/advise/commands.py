"""The command lines that a sizing comes to: servers, the gateway in front of them, documents of platforms.

Does: text that can be pasted; a place to fill in is in capitals. Does not: run anything.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from tonle.advise.choose import Group, Question, Sizing

_PORT = 8000
_SHOWN_BACKENDS = 4  # more go into a file
_GATEWAY_FILE = "gateway.yaml"


def command_lines(question: Question, sizing: Sizing) -> list[str]:
    lines = []
    for group in sizing.groups:
        count = f"{group.replicas} of these" if group.replicas > 1 else "one of these"
        kind = "" if group.length == "any" else f" for {group.length} prompts"
        lines += [f"# {count}{kind}, {_gpus(group)}", server_line(question, group)]
    lines += ["# in front of them: admission, queue, keys, routing", gateway_line(sizing)]
    if question.gpu.deploy_name is not None:
        lines.append("# or as documents of a platform, from the settings files below")
        lines += [f"tonle deploy render kubernetes --config {settings_name(group)}" for group in sizing.groups]
    return lines


def settings_name(group: Group) -> str:
    return "tonle.yaml" if group.length == "any" else f"tonle-{group.length}.yaml"


def settings_files(question: Question, sizing: Sizing) -> dict[str, str]:
    """By name: what `--config` of `tonle serve`, `tonle deploy render` and `tonle gateway` take."""
    files = {settings_name(group): _settings_file(question, group) for group in sizing.groups}
    if _GATEWAY_FILE in gateway_line(sizing):
        files[_GATEWAY_FILE] = _gateway_file(question, sizing)
    return files


def _settings_file(question: Question, group: Group) -> str:
    settings, times = group.settings, group.option.times
    rows: dict[str, object] = {"model": _checkpoint(question, group)}
    rows |= {name: value for name, value in msgspec.to_builtins(settings).items() if value != "auto"}
    lines = [f"{name}: {value}" for name, value in rows.items()]
    if question.gpu.deploy_name is not None:
        lines += ["deploy:", f"  gpu: {question.gpu.deploy_name}"]
        if group.length != "any":
            lines.append(f"  name: {group.length}-prompts")
        if group.option.not_served:
            lines.append("  engine: vllm")
        if times.gpus > 1:
            lines.append(f"  gpus: {times.gpus}")
        lines += [
            f"  parameters: {question.shape.parameters / 1e9:.4g}B",
            f"  min_replicas: {group.replicas}",
            f"  max_replicas: {max(2, 2 * group.replicas)}",
        ]
    return "\n".join(lines) + "\n"


def _checkpoint(question: Question, group: Group) -> str:
    name = group.option.times.precision.name
    if name == "bf16" or question.shape.stored_as == name:
        own = question.shape.name
        is_found = "/" in own or Path(own).exists()  # by a server; names of the table are not models of the hub
        return shlex.quote(own) if is_found else "MODEL"
    return {"fp8": "FP8_CHECKPOINT", "int8": "W8A8_CHECKPOINT"}.get(name, "AWQ_OR_GPTQ_CHECKPOINT")


def _gpus(group: Group) -> str:
    gpus = group.option.times.gpus
    return f"each on {gpus} GPUs" if gpus > 1 else "each on one GPU"


def server_line(question: Question, group: Group) -> str:
    times, settings = group.option.times, group.settings
    flags = [
        f"--max-model-len {settings.max_model_len}",
        f"--max-num-seqs {settings.max_num_seqs}",
        f"--max-num-batched-tokens {settings.max_num_batched_tokens}",
        f"--long-prefill-token-threshold {settings.long_prefill_token_threshold}",
    ]
    if settings.kv_cache_dtype != "auto":
        flags.append(f"--kv-cache-dtype {settings.kv_cache_dtype}")
    if not group.option.not_served:
        return " ".join(["tonle serve", _checkpoint(question, group), *flags])
    if times.gpus > 1:
        flags.insert(0, f"--tensor-parallel-size {times.gpus}")
    return " ".join(["vllm serve", _checkpoint(question, group), *flags])


def gateway_line(sizing: Sizing) -> str:
    if sizing.split:
        return f"tonle gateway --config {_GATEWAY_FILE}"
    backends = [f"--backend {_url(sizing.groups[0], number)}" for number in range(1, sizing.replicas + 1)]
    if len(backends) > _SHOWN_BACKENDS:
        return f"tonle gateway --config {_GATEWAY_FILE}"
    return " ".join(["tonle gateway", *backends, f"--max-concurrent {sizing.groups[0].settings.max_num_seqs}"])


def _url(group: Group, number: int) -> str:
    kind = "" if group.length == "any" else f"{group.length}-"
    return f"http://{kind}host-{number}:{_PORT}"


def _gateway_file(question: Question, sizing: Sizing) -> str:
    lines = [f"length_threshold: {question.length_threshold}"] if sizing.split else []
    lines.append("backends:")
    for group in sizing.groups:
        name = "replica" if group.length == "any" else group.length
        lines += [
            f"  - {{name: {name}-{number}, url: '{_url(group, number)}', length: {group.length}, "
            f"max_concurrent: {group.settings.max_num_seqs}}}"
            for number in range(1, group.replicas + 1)
        ]
    return "\n".join(lines) + "\n"
