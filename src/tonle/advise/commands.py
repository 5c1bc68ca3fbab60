"""The command lines that a sizing comes to: servers, the gateway in front of them, documents of platforms.

Does: text that can be pasted; a place to fill in is in capitals. Does not: run anything.
"""

from __future__ import annotations

import shlex

import msgspec

from tonle.advise.choose import Group, Question, Sizing
from tonle.advise.option import Settings

_FIRST_PORT = 8000
_SHOWN_BACKENDS = 4


def command_lines(question: Question, sizing: Sizing) -> list[str]:
    lines = []
    for group in sizing.groups:
        settings = group.option.settings
        assert settings is not None
        count = f"{group.replicas} of these" if group.replicas > 1 else "one of these"
        kind = "" if group.length == "any" else f" for {group.length} prompts"
        lines += [f"# {count}{kind}, {_gpus(group)}", server_line(question, group, settings)]
    lines += ["# in front of them: admission, queue, keys, routing", *gateway_lines(question, sizing)]
    if question.gpu.deploy_name is not None:
        lines.append("# or as documents of a platform, from the settings files below")
        lines += [f"tonle deploy render kubernetes --config {settings_name(group)}" for group in sizing.groups]
    return lines


def settings_name(group: Group) -> str:
    return "tonle.yaml" if group.length == "any" else f"tonle-{group.length}.yaml"


def settings_files(question: Question, sizing: Sizing) -> dict[str, str]:
    """By name: what `tonle serve --config` and `tonle deploy render --config` take."""
    return {settings_name(group): _settings_file(question, group) for group in sizing.groups}


def _settings_file(question: Question, group: Group) -> str:
    settings, times = group.option.settings, group.option.times
    assert settings is not None
    rows: dict[str, object] = {"model": _checkpoint(question, group)}
    rows |= {name: value for name, value in msgspec.to_builtins(settings).items() if value != "auto"}
    lines = [f"{name}: {value}" for name, value in rows.items()]
    if question.gpu.deploy_name is not None:
        lines += ["deploy:", f"  gpu: {question.gpu.deploy_name}"]
        if group.length != "any":
            lines.append(f"  name: {group.length}-prompts")
        if group.option.served:
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
        return shlex.quote(question.shape.name) if question.shape.architecture else "MODEL"
    return {"fp8": "FP8_CHECKPOINT", "int8": "W8A8_CHECKPOINT"}.get(name, "AWQ_OR_GPTQ_CHECKPOINT")


def _gpus(group: Group) -> str:
    gpus = group.option.times.gpus
    return f"each on {gpus} GPUs" if gpus > 1 else "each on one GPU"


def server_line(question: Question, group: Group, settings: Settings) -> str:
    times = group.option.times
    flags = [
        f"--max-model-len {settings.max_model_len}",
        f"--max-num-seqs {settings.max_num_seqs}",
        f"--max-num-batched-tokens {settings.max_num_batched_tokens}",
        f"--long-prefill-token-threshold {settings.long_prefill_token_threshold}",
    ]
    if settings.kv_cache_dtype != "auto":
        flags.append(f"--kv-cache-dtype {settings.kv_cache_dtype}")
    if not group.option.served:
        return " ".join(["tonle serve", _checkpoint(question, group), *flags])
    if times.gpus > 1:
        flags.insert(0, f"--tensor-parallel-size {times.gpus}")
    return " ".join(["vllm serve", _checkpoint(question, group), *flags])


def gateway_lines(question: Question, sizing: Sizing) -> list[str]:
    first = sizing.groups[0].option.settings
    assert first is not None
    if not sizing.split:
        backends = [f"--backend http://HOST-{number}:{_FIRST_PORT}" for number in range(1, min(sizing.replicas, _SHOWN_BACKENDS) + 1)]
        if sizing.replicas > _SHOWN_BACKENDS:
            backends.append("…")
        return [" ".join(["tonle gateway", *backends, f"--max-concurrent {first.max_num_seqs}"])]
    lines = ["tonle gateway --config gateway.yaml   # with:", f"length_threshold: {question.length_threshold}", "backends:"]
    for group in sizing.groups:
        settings = group.option.settings
        assert settings is not None
        for number in range(1, min(group.replicas, _SHOWN_BACKENDS) + 1):
            lines.append(
                f"  - {{name: {group.length}-{number}, url: 'http://{group.length.upper()}-HOST-{number}:{_FIRST_PORT}', "
                f"length: {group.length}, max_concurrent: {settings.max_num_seqs}}}"
            )
        if group.replicas > _SHOWN_BACKENDS:
            lines.append(f"  # … {group.replicas - _SHOWN_BACKENDS} more like these")
    return lines
