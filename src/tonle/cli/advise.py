"""`tonle advise`: how to serve a model on given GPUs for a workload and an SLO, with reasons. Never loads torch, needs no GPU.

Exit status: 0 there is a sizing · 1 nothing fits, or the SLO does not hold in simulation · 2 wrong input · 130 Ctrl-C.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonle.bench import Span
from tonle.bench.slo import Slo
from tonle.cli.screen import show_error, stderr, stdout
from tonle.cli.slo_flags import with_slo_flags
from tonle.errors import ConfigError, TonleError

if TYPE_CHECKING:
    from tonle.advise.advice import Advice
    from tonle.advise.gpus import DataSheet
    from tonle.advise.shape import ModelShape
    from tonle.advise.workload import Workload

NOT_HELD = 1
WRONG_INPUT = 2

_model = partial(typer.Option, rich_help_panel="Model by its numbers", show_default=False)
_gpu = partial(typer.Option, rich_help_panel="GPU", show_default=False)
_load = partial(typer.Option, rich_help_panel="Workload", show_default=False)
_limits = partial(typer.Option, rich_help_panel="What may be chosen", show_default=False)
_report = partial(typer.Option, rich_help_panel="Report", show_default=False)

_MODEL = (
    "A folder with config.json, a .gguf file, a hub model that was fetched, or a known name such as llama-3.1-70b or "
    "qwen2.5-7b; `list` prints those. Left out if --params and others describe it."
)
_GPU = "A GPU by its data sheet, such as H200, L40S or A100-80GB; `list` prints them with their numbers."
_PRECISION = (
    "Only these precisions of weights: bf16, fp8, int8, int4; a list such as bf16,fp8. Default: all that make sense."
)
_ENGINE = "tonle, vllm, or auto (the default): Tonle's engine if it can serve an option that fits, else vLLM behind the gateway."
_THRESHOLD = "Prompts from this many tokens on are long ones, which may get replicas of their own. Default: 5000."


class EngineName(enum.StrEnum):
    auto = "auto"
    tonle = "tonle"
    vllm = "vllm"


class KvName(enum.StrEnum):
    auto = "auto"
    bf16 = "bf16"
    fp8 = "fp8"


@with_slo_flags
def advise(
    slo: Slo,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False)] = None,
    gpu: Annotated[str | None, _gpu(metavar="NAME", help=_GPU)] = None,
    memory: Annotated[str | None, _gpu(metavar="SIZE", help="Of one GPU: 141GB, 80GiB.")] = None,
    bandwidth: Annotated[str | None, _gpu(metavar="RATE", help="Of its memory: 4.8TB/s, 864GB/s.")] = None,
    flops: Annotated[str | None, _gpu(metavar="RATE", help="Dense bf16 operations per second: 990T.")] = None,
    fp8_flops: Annotated[
        str | None, _gpu(metavar="RATE", help="The same in fp8: 1980T. Left out: it has no fp8 units.")
    ] = None,
    link: Annotated[
        str | None,
        _gpu(metavar="RATE", help="To the other GPUs of its server, one way: 450GB/s. Default: 32GB/s (PCIe 4)."),
    ] = None,
    price: Annotated[
        float | None, _gpu(metavar="N", help="Of one GPU per hour, in your currency. Left out: no costs are shown.")
    ] = None,
    preset: Annotated[
        str | None,
        _load(metavar="NAME", help="A named workload, as of `tonle bench`: chat, long, … Lengths below go over it."),
    ] = None,
    input_tokens: Annotated[
        str | None, _load(metavar="N|N-N", help="Tokens per prompt: 512 (the default), or a range such as 1000-20000.")
    ] = None,
    output_tokens: Annotated[
        str | None, _load(metavar="N|N-N", help="Tokens per answer: 256 (the default), or a range such as 100-2000.")
    ] = None,
    shared_prefix_tokens: Annotated[
        int | None,
        _load(metavar="N", help="Tokens that all prompts have in common at the start, in addition to their own."),
    ] = None,
    concurrency: Annotated[
        int | None, _load(metavar="N", help="So many users, each waiting for an answer before the next request.")
    ] = None,
    rate: Annotated[float | None, _load(metavar="N", help="So many requests per second, arriving at random.")] = None,
    precision: Annotated[str | None, _limits(metavar="NAME,...", help=_PRECISION)] = None,
    kv_dtype: Annotated[
        KvName,
        _limits(metavar="NAME", help="Of keys and values: bf16, fp8, or auto (the default): fp8 only if needed."),
    ] = KvName.auto,
    gpus_per_replica: Annotated[
        str | None,
        _limits(metavar="N,...", help="Only these: 1, 2, 4, 8 or a list. Default: all of them are compared."),
    ] = None,
    engine: Annotated[EngineName, _limits(metavar="NAME", help=_ENGINE)] = EngineName.auto,
    length_threshold: Annotated[int, _limits(metavar="N", help=_THRESHOLD)] = 5000,
    params: Annotated[str | None, _model(metavar="N", help="Parameters: 70B, 1.5B.")] = None,
    active_params: Annotated[
        str | None, _model(metavar="N", help="Of those, multiplied with each token (mixture of experts). Default: all.")
    ] = None,
    layers: Annotated[int | None, _model(metavar="N", help="Layers.")] = None,
    kv_heads: Annotated[int | None, _model(metavar="N", help="Heads of keys and values.")] = None,
    head_size: Annotated[int | None, _model(metavar="N", help="Numbers of a head.")] = None,
    heads: Annotated[int | None, _model(metavar="N", help="Heads of queries. Default: estimated.")] = None,
    hidden_size: Annotated[int | None, _model(metavar="N", help="Of the hidden states. Default: estimated.")] = None,
    vocab_size: Annotated[
        int | None, _model(metavar="N", help="Tokens of the vocabulary. Default: all weights are taken for layers.")
    ] = None,
    context: Annotated[str | None, _model(metavar="N", help="Longest context, in tokens. Default: 131072.")] = None,
    simulate: Annotated[
        bool, _report("--simulate/--no-simulate", metavar="", help="Check the sizing in simulation. Default: yes.")
    ] = True,
    json_file: Annotated[
        Path | None,
        _report("--json", metavar="FILE", help="Save everything as JSON; - prints it instead of the report."),
    ] = None,
    markdown_file: Annotated[
        Path | None, _report("--markdown", metavar="FILE", help="Save the report as Markdown; - prints it instead.")
    ] = None,
) -> None:
    """Size a deployment: precision, GPUs per replica, replicas, limits, each with its reason, checked in simulation.

    [dim]Example:[/dim]  tonle advise llama-3.1-70b --gpu H100 --preset long --rate 4 --ttft-p95 8s --itl-p99 250ms --price 3

    Exit status: 0 there is a sizing, 1 nothing fits or the SLO does not hold in simulation, 2 wrong input, 130 Ctrl-C.
    """
    if model == "list" or gpu == "list":
        _print_list(models=model == "list")
        return
    try:
        from tonle.advise.advice import advise as make_advice
        from tonle.advise.choose import Question
        from tonle.bench.report import check_writable

        for file in (json_file, markdown_file):
            if file is not None and str(file) != "-":
                check_writable(file)
        numbers = {
            "params": params, "active_params": active_params, "layers": layers, "kv_heads": kv_heads, "head_size": head_size,
            "heads": heads, "hidden_size": hidden_size, "vocab_size": vocab_size, "context": context,
        }  # fmt: skip
        lengths = {"input_tokens": input_tokens, "output_tokens": output_tokens, "shared": shared_prefix_tokens}
        question = Question(
            shape=_shape(model, numbers),
            gpu=_data_sheet(gpu, memory, bandwidth, flops, fp8_flops, link),
            workload=_workload(preset, lengths, concurrency, rate),
            slo=slo,
            precisions=_names(precision),
            gpu_counts=_counts(gpus_per_replica),
            kv=kv_dtype.value,
            engine=engine.value,
            price_per_hour=price,
            length_threshold=length_threshold,
        )
        console = stderr()
        advice = make_advice(
            question,
            simulated=simulate,
            on_check=lambda text: console.print(f"simulating: {text}", style="dim", markup=False),
        )
        _write(advice, json_file, markdown_file)
    except TonleError as error:
        show_error(error)
        raise typer.Exit(WRONG_INPUT) from None
    if not advice.ok:
        raise typer.Exit(NOT_HELD)


def _shape(model: str | None, numbers: dict[str, Any]) -> ModelShape:
    from tonle.advise.read_model import find_model
    from tonle.advise.shape import shape_of_numbers
    from tonle.advise.units import parse_count

    given = {name: value for name, value in numbers.items() if value is not None}
    if model is not None:
        if given:
            first = next(iter(given)).replace("_", "-")
            raise ConfigError(
                f"--{first} describes a model by its numbers: leave {model} out, or the numbers", param="model"
            )
        return find_model(model)
    needed = ("params", "layers", "kv_heads", "head_size")
    if missing := [f"--{name.replace('_', '-')}" for name in needed if name not in given]:
        if not given:
            raise ConfigError(
                "name a model (tonle advise llama-3.1-70b …; `tonle advise list` prints known ones), or give --params, "
                "--layers, --kv-heads and --head-size",
                param="model",
            )
        raise ConfigError(f"to describe a model by its numbers, also give {', '.join(missing)}", param="model")
    for name in ("layers", "kv_heads", "head_size", "heads", "hidden_size", "vocab_size"):
        if name in given and given[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {given[name]}", param=name)
    return shape_of_numbers(
        parameters=parse_count(given["params"], "params"),
        active_parameters=parse_count(given["active_params"], "active_params") if "active_params" in given else None,
        layers=given["layers"],
        kv_heads=given["kv_heads"],
        head_size=given["head_size"],
        heads=given.get("heads"),
        hidden_size=given.get("hidden_size"),
        vocab_size=given.get("vocab_size"),
        context_length=parse_count(given["context"], "context") if "context" in given else None,
    )


def _data_sheet(
    gpu: str | None,
    memory: str | None,
    bandwidth: str | None,
    flops: str | None,
    fp8_flops: str | None,
    link: str | None,
) -> DataSheet:
    from tonle.advise.gpus import find_data_sheet, own_data_sheet
    from tonle.advise.units import parse_bandwidth, parse_bytes, parse_flops

    return own_data_sheet(
        None if gpu is None else find_data_sheet(gpu),
        memory=None if memory is None else parse_bytes(memory, "memory"),
        bandwidth=None if bandwidth is None else parse_bandwidth(bandwidth, "bandwidth"),
        flops=None if flops is None else parse_flops(flops, "flops"),
        fp8_flops=None if fp8_flops is None else parse_flops(fp8_flops, "fp8_flops"),
        link=None if link is None else parse_bandwidth(link, "link"),
    )


def _workload(preset: str | None, lengths: dict[str, Any], users: int | None, rate: float | None) -> Workload:
    from tonle.advise.workload import Workload, preset_lengths

    prompts, answers, shared = Span(512, 512), Span(256, 256), 0
    if preset is not None:
        prompts, answers, shared = preset_lengths(preset)
    if lengths["input_tokens"] is not None:
        prompts = Span.parse(lengths["input_tokens"], "input_tokens")
    if lengths["output_tokens"] is not None:
        answers = Span.parse(lengths["output_tokens"], "output_tokens")
    if lengths["shared"] is not None:
        shared = lengths["shared"]
    return Workload.of_spans(prompts, answers, users=users, rate=rate, shared_prefix=shared)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip().lower() for part in (text or "").split(",") if part.strip())


def _counts(text: str | None) -> tuple[int, ...]:
    from tonle.advise.choose import GPU_COUNTS

    if text is None:
        return GPU_COUNTS
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(
            f"--gpus-per-replica must be 1, 2, 4 or 8, or a list of these, not {text!r}", param="gpus_per_replica"
        ) from None


def _write(advice: Advice, json_file: Path | None, markdown_file: Path | None) -> None:
    import msgspec

    from tonle.advise.render import markdown, print_advice

    texts: list[tuple[Path | None, Callable[[], str]]] = [
        (json_file, lambda: msgspec.json.format(msgspec.json.encode(advice), indent=2).decode() + "\n"),
        (markdown_file, lambda: markdown(advice)),
    ]
    for file, text in texts:
        if file is not None and str(file) != "-":
            file.write_text(text(), encoding="utf-8")
        elif file is not None:
            typer.echo(text(), nl=False)
    printed = any(file is not None and str(file) == "-" for file, _ in texts)
    if not printed:
        from rich.console import Console

        print_advice(advice, Console(highlight=False))


def _print_list(*, models: bool) -> None:
    from tonle.advise.gpus import GPUS
    from tonle.advise.known_shapes import KNOWN_SHAPES, known_shape
    from tonle.advise.units import bytes_text, count_text, flops_text

    console = stdout()
    if models:
        for name in KNOWN_SHAPES:
            shape = known_shape(name)
            assert shape is not None
            active = f", {count_text(shape.active_parameters)} active" if shape.experts else ""
            console.print(f"{name:18} {count_text(shape.parameters):>6} parameters{active}", markup=False)
        return
    for sheet in GPUS.values():
        fp8 = f"{flops_text(sheet.fp8)}FLOP/s in fp8" if sheet.fp8 else "no fp8"
        console.print(
            f"{sheet.name:10} {bytes_text(sheet.memory_bytes):>8}  {bytes_text(sheet.bandwidth):>8}/s  "
            f"{flops_text(sheet.bf16):>6}FLOP/s in bf16, {fp8}, {sheet.link_name}",
            markup=False,
        )
