"""`tonle bench`: measure any OpenAI-compatible server. Never loads torch. `tonle bench scenarios` is in `bench_scenarios.py`,
`tonle bench report` and `compare` are in `bench_report.py`.

Exit status: 0 every request was answered in full and the SLO held, if one was given; of a sweep: a load was found · 1 not so ·
2 it could not start · 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import enum
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tonle.bench import BenchOptions, BenchReport, Watch, run_bench, save_report
from tonle.bench.kinds.settings import refuse_settings
from tonle.bench.options import Pause, Span, parse_numbers, parse_ramp
from tonle.bench.progress import LineWatch, LiveWatch
from tonle.bench.report import check_writable
from tonle.bench.slo import Slo
from tonle.bench.tables import print_report
from tonle.bench.tally import Unit
from tonle.child.open_files import raise_limit
from tonle.cli import bench_report, bench_scenarios
from tonle.cli.bench_data import with_data_flags
from tonle.cli.screen import show_error
from tonle.cli.slo_flags import with_slo_flags
from tonle.errors import ConfigError, TonleError

NOT_WELL = 1  # some requests failed, or the SLO was missed
COULD_NOT_START = 2
INTERRUPTED = 130

bench = typer.Typer(
    name="bench",
    invoke_without_command=True,
    subcommand_metavar="[COMMAND]",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
bench_scenarios.register(bench)
bench_report.register(bench)

_target = partial(typer.Option, rich_help_panel="Target")
_kind = partial(typer.Option, rich_help_panel="Kind of requests", show_default=False)
_load = partial(typer.Option, rich_help_panel="Load")
_prompts = partial(typer.Option, rich_help_panel="Prompts")
_report = partial(typer.Option, rich_help_panel="Report")

_KIND = (
    "What is asked for: chat (also completions; the default), embeddings, rerank, asr (transcriptions), tts (speech) or images. "
    "Lengths, sampling and replays are for chat."
)
_ITEMS = "Texts to embed (1 by default), documents to rank (10) or images (1) per request."
_SENTENCES = (
    "Sentences of each text. Default: embeddings 1-16, rerank 2-12, tts 1-4, images 1. With --data khmer, of that set."
)
_AUDIO_SECONDS = "asr without --data: seconds of the made-up sounds, which hold no words. Default: 2-15."
_CONCURRENCY = (
    "Closed loop: N users, each waiting for an answer before the next request; 1,4,16 runs three levels. Default: 1."
)
_RATE = (
    "Open loop: N requests per second, sent whether or not earlier ones are answered; a list runs one level for each."
)
_RAMP = "Open loop: a rate that rises, or falls, evenly over --duration, such as 1-20 requests per second."
_SWEEP = (
    "rate or concurrency: find saturation. Doubles the load until throughput no longer grows, or the SLO is missed; "
    "then halves the bracket. Starts at --rate or --concurrency, or at 1."
)
_ARRIVALS = "Open loop: gaps between requests: poisson, constant, or gamma. Default: poisson; gamma with --burstiness."
_BURSTINESS = "Shape of gamma gaps: 1 is Poisson, less comes in bursts, more is more even."
_PROCESSES = "Processes to spread the client over, for a server that writes more than one can read."
_REQUESTS = (
    "Requests per level. Default: 4 per user but at least 8; with --rate, 20 s of arrivals; with --duration, no limit."
)


class KindName(enum.StrEnum):
    chat = "chat"
    embeddings = "embeddings"
    rerank = "rerank"
    asr = "asr"
    tts = "tts"
    images = "images"


class EndpointName(enum.StrEnum):
    chat = "chat"
    completions = "completions"


class ArrivalsName(enum.StrEnum):
    poisson = "poisson"
    constant = "constant"
    gamma = "gamma"


class SweepName(enum.StrEnum):
    rate = "rate"
    concurrency = "concurrency"


@bench.callback()
@with_data_flags(before="ignore_eos")
@with_slo_flags
def levels(
    ctx: typer.Context,
    slo: Slo,
    data: dict[str, Any],
    url: Annotated[str, _target(metavar="URL", help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        _target(
            "--model",
            "--as-model",
            metavar="MODEL",
            help="Model to ask for. Default: the first one that /v1/models lists; of a batch file or a replay, the one it names.",
        ),
    ] = None,
    api_key: Annotated[
        str | None, _target(metavar="KEY", help="Bearer token; never saved.", envvar="OPENAI_API_KEY")
    ] = None,
    endpoint: Annotated[
        EndpointName | None,
        _target(metavar="NAME", help="chat or completions. Default: completions, or chat if --data holds messages."),
    ] = None,
    insecure: Annotated[bool, _target("--insecure", metavar="", help="Accept any TLS certificate.")] = False,
    kind: Annotated[KindName, _kind(metavar="NAME", help=_KIND)] = KindName.chat,
    items: Annotated[str | None, _kind(metavar="N|N-N", help=_ITEMS)] = None,
    sentences: Annotated[str | None, _kind(metavar="N|N-N", help=_SENTENCES)] = None,
    audio_seconds: Annotated[str | None, _kind(metavar="N|N-N", help=_AUDIO_SECONDS)] = None,
    concurrency: Annotated[str | None, _load(metavar="N,...", help=_CONCURRENCY)] = None,
    rate: Annotated[str | None, _load(metavar="N,...", help=_RATE)] = None,
    ramp: Annotated[str | None, _load(metavar="N-N", help=_RAMP)] = None,
    sweep: Annotated[SweepName | None, _load(metavar="NAME", help=_SWEEP)] = None,
    max_levels: Annotated[int, _load(metavar="N", help="Levels after which a sweep ends at the latest.")] = 16,
    arrivals: Annotated[ArrivalsName | None, _load(metavar="NAME", help=_ARRIVALS)] = None,
    burstiness: Annotated[float | None, _load(metavar="N", help=_BURSTINESS)] = None,
    requests: Annotated[int | None, _load(metavar="N", help=_REQUESTS)] = None,
    duration: Annotated[
        float | None, _load(metavar="N", help="Seconds per level; requests still running at the end are finished.")
    ] = None,
    warmup: Annotated[int, _load(metavar="N", help="Uncounted requests before each level.")] = 2,
    timeout: Annotated[float, _load(metavar="N", help="Seconds after which a request counts as failed.")] = 600.0,
    processes: Annotated[int, _load(metavar="N", help=_PROCESSES)] = 1,
    ignore_eos: Annotated[
        bool | None,
        _prompts(
            "--ignore-eos/--no-ignore-eos",
            metavar="",
            help="Ask for answers of full length. Default: yes, unless --data or --replay is given.",
        ),
    ] = None,
    temperature: Annotated[
        float, _prompts(metavar="N", help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.0,
    seed: Annotated[
        int,
        _prompts(
            metavar="N", help="The same seed gives the same prompts; a new one avoids hits in a warm prefix cache."
        ),
    ] = 0,
    extra_body: Annotated[
        str | None, _prompts(metavar="JSON", help="JSON object merged into every request; null removes a field.")
    ] = None,
    json_file: Annotated[
        Path | None, _report("--json", metavar="FILE", help="Save the full report to this file.")
    ] = None,
    save_requests: Annotated[
        bool,
        _report("--save-requests/--no-save-requests", metavar="", help="One row per request in the saved report."),
    ] = True,
    quiet: Annotated[bool, _report("--quiet", "-q", metavar="", help="Print nothing but errors.")] = False,
) -> None:
    """Measure an OpenAI-compatible server: time to first token, time per token, throughput.

    [dim]Example:[/dim]  tonle bench --concurrency 1,4,16 --input-tokens 128 --output-tokens 64 --json report.json

    Exit status: 0 all requests answered in full and the SLO held, 1 not so, 2 could not start, 130 stopped with Ctrl-C.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    try:
        if json_file is not None:
            check_writable(json_file)
        _check_given(ctx, kind)
        options = BenchOptions(
            kind=kind.value,
            items=None if items is None else Span.parse(items, "items"),
            sentences=None if sentences is None else Span.parse(sentences, "sentences"),
            audio_seconds=None if audio_seconds is None else Pause.parse(audio_seconds, "audio_seconds"),
            url=url,
            model=model,
            api_key=api_key,
            endpoint=None if endpoint is None else endpoint.value,
            verify_tls=not insecure,
            concurrency=users_of(concurrency, open_loop=rate or ramp),
            rates=() if rate is None else parse_numbers(rate, "rate"),
            ramp=None if ramp is None else parse_ramp(ramp, "ramp"),
            sweep=None if sweep is None else sweep.value,
            max_levels=max_levels,
            arrivals=None if arrivals is None else arrivals.value,
            burstiness=burstiness,
            requests=requests,
            duration_s=duration,
            warmup=warmup,
            timeout_s=timeout,
            processes=processes,
            slo=slo,
            seed=seed,
            ignore_eos=ignore_eos,
            temperature=temperature,
            extra_body=_object(extra_body),
            keep_requests=save_requests,
            **data,
        )
        raise_limit()  # each request at the same time is a connection
        report = run_bench(options, _watch(kind, quiet=quiet))
    except TonleError as error:
        show_error(error)
        raise typer.Exit(COULD_NOT_START) from None
    if json_file is not None:
        save_report(report, json_file)
    if not quiet:
        print_report(report, Console())
    _leave(report)


def _refuse_options(ctx: typer.Context) -> None:
    """`tonle bench --url X scenarios` would measure another server than X."""
    for param in ctx.command.params:
        source = ctx.get_parameter_source(str(param.name))
        if source is not None and source.name == "COMMANDLINE":
            name = ctx.invoked_subcommand
            ctx.fail(f"`tonle bench {name}` has its own options: put {param.opts[0]} after `{name}`")


def users_of(concurrency: str | None, *, open_loop: str | None) -> tuple[int, ...]:
    if concurrency is None:
        return (1,)
    if open_loop is not None:
        raise ConfigError("give --concurrency (closed loop) or --rate or --ramp (open loop), not both", param="rate")
    numbers = parse_numbers(concurrency, "concurrency")
    if any(number != int(number) for number in numbers):
        raise ConfigError(
            f"--concurrency must be a whole number or a list of them, not {concurrency!r}", param="concurrency"
        )
    return tuple(int(number) for number in numbers)


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}", param="extra_body") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body must be a JSON object, not {text!r}", param="extra_body")
    return value


def _check_given(ctx: typer.Context, kind: KindName) -> None:
    """Refuse a flag that this kind of requests does not have, also one that only repeats a default."""
    sources = {str(param.name): ctx.get_parameter_source(str(param.name)) for param in ctx.command.params}
    refuse_settings(
        kind.value, [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    )


def _watch(kind: KindName, *, quiet: bool) -> Watch | None:
    if quiet:
        return None
    console = Console(stderr=True)
    unit: Unit = "tok/s" if kind is KindName.chat else "req/s"
    return LiveWatch(console, unit) if console.is_terminal else LineWatch(console, unit)


def _leave(report: BenchReport) -> None:
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.saturation is not None:  # the levels beyond it are there to fail
        if report.saturation.load is None:
            raise typer.Exit(NOT_WELL)
    elif not (report.ok and report.slo_held):
        raise typer.Exit(NOT_WELL)
