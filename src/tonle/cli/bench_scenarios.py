"""`tonle bench scenarios`: questions asked one at a time, from the cache, and at once; P95 held against a target.

Exit status: 0 every scenario met the SLA and every request was answered · 1 not so · 2 it could not start · 130 Ctrl-C.
Never loads torch, except with --library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tonle.bench import ScenarioOptions, ScenarioReport, ScenarioWatch, run_scenarios, save_report
from tonle.bench.progress import LineWatch, LiveWatch
from tonle.bench.report import check_writable
from tonle.bench.scenario_blocks import print_scenarios
from tonle.cli.screen import show_error
from tonle.errors import ConfigError, TonleError

MISSED = 1
COULD_NOT_START = 2
INTERRUPTED = 130

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULTS = ScenarioOptions()

_target = partial(typer.Option, rich_help_panel="Target")
_questions = partial(typer.Option, rich_help_panel="Questions")
_report = partial(typer.Option, rich_help_panel="Report")

_MODEL = "Model to ask for. Default: the first one that /v1/models lists. With --library: its file, folder or name."
_LIBRARY = "Measure tonle.create_optimized_engine in this process instead of a server."
_SEED = "The same seed gives the same questions. Default: a new one each time, so that no cache has seen them."


def register(app: typer.Typer) -> None:
    """Add the command of this file to `app`."""
    app.command("scenarios")(scenarios)


def scenarios(
    url: Annotated[
        str | None, _target(metavar="URL", help=f"The server, with or without /v1. Default: {DEFAULT_URL}.")
    ] = None,
    model: Annotated[str | None, _target(metavar="MODEL", help=_MODEL)] = None,
    api_key: Annotated[
        str | None, _target(metavar="KEY", help="Bearer token; never saved.", envvar="OPENAI_API_KEY")
    ] = None,
    insecure: Annotated[bool, _target("--insecure", metavar="", help="Accept any TLS certificate.")] = False,
    library: Annotated[bool, _target("--library", metavar="", help=_LIBRARY)] = False,
    requests: Annotated[int, _questions(metavar="N", help="Questions per scenario.")] = DEFAULTS.requests,
    concurrency: Annotated[
        int, _questions(metavar="N", help="Questions at once in the concurrent scenario.")
    ] = DEFAULTS.concurrency,
    repeat_share: Annotated[
        float, _questions(metavar="N", help="Share of the questions that were asked earlier in the same scenario.")
    ] = DEFAULTS.repeat_share,
    output_tokens: Annotated[int, _questions(metavar="N", help="Most tokens per answer.")] = DEFAULTS.output_tokens,
    warmup: Annotated[int, _questions(metavar="N", help="Uncounted questions before each scenario.")] = DEFAULTS.warmup,
    timeout: Annotated[
        float, _questions(metavar="N", help="Seconds after which a request counts as failed.")
    ] = DEFAULTS.timeout_s,
    seed: Annotated[int | None, _questions(metavar="N", help=_SEED)] = None,
    sla: Annotated[float, _report(metavar="N", help="The SLA: P95 must be below this many seconds.")] = DEFAULTS.sla_s,
    json_file: Annotated[
        Path | None, _report("--json", metavar="FILE", help="Save the full report to this file.")
    ] = None,
    save_requests: Annotated[
        bool, _report("--save-requests", metavar="", help="Include one row per request in the report.")
    ] = False,
    quiet: Annotated[bool, _report("--quiet", "-q", metavar="", help="Print nothing but errors.")] = False,
) -> None:
    """Ask everyday questions in three scenarios and say whether P95 latency meets an SLA.

    One at a time without the response cache, one at a time with it, and several at once without it.

    A Tonle server is asked by /api/v1/inference, any other by chat completions: there the second scenario is left out.

    [dim]Example:[/dim]  tonle bench scenarios --requests 100 --concurrency 5 --sla 2.0 --json report.json

    Exit status: 0 the SLA is met and all requests were answered, 1 not so, 2 could not start, 130 stopped with Ctrl-C.
    """
    options = ScenarioOptions(
        requests=requests,
        concurrency=concurrency,
        repeat_share=repeat_share,
        output_tokens=output_tokens,
        warmup=warmup,
        timeout_s=timeout,
        sla_s=sla,
        seed=seed,
        keep_requests=save_requests,
        model=model,
        api_key=api_key,
        verify_tls=not insecure,
    )
    try:
        options.validate()
        if json_file is not None:
            check_writable(json_file)
        if library and url is not None:
            raise ConfigError("give --url (a server) or --library (this process), not both", param="library")
        with _library_engine(model, quiet=quiet) if library else contextlib.nullcontext(url or DEFAULT_URL) as target:
            report = run_scenarios(target, options, _watch(quiet=quiet))
    except TonleError as error:
        show_error(error)
        raise typer.Exit(COULD_NOT_START) from None
    if json_file is not None:
        save_report(report, json_file)
    if not quiet:
        print_scenarios(report)
    _leave(report)


@contextlib.contextmanager
def _library_engine(model: str | None, *, quiet: bool) -> Iterator[Any]:
    """The library's engine, imported here alone: it loads torch."""
    if not quiet:
        Console(stderr=True).print("loading the model…", highlight=False)
    from tonle import create_optimized_engine

    with create_optimized_engine(model_path=model, enable_cache=True) as engine:
        yield engine


def _watch(*, quiet: bool) -> ScenarioWatch | None:
    if quiet:
        return None
    console = Console(stderr=True)
    return LiveWatch(console, "req/s") if console.is_terminal else LineWatch(console, "req/s")


def _leave(report: ScenarioReport) -> None:
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not report.ok:
        raise typer.Exit(MISSED)
