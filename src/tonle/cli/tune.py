"""`tonle tune`: settings of a server that hold an SLO under a load, with the evidence. Never loads torch in this process.

Exit status: 0 it has a result, which may be "keep the default" · 2 it could not start · 130 Ctrl-C: the best so far is saved.
"""

from __future__ import annotations

import enum
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonle.bench import BenchOptions
from tonle.bench.slo import Slo, parse_duration_ms
from tonle.cli.bench_data import with_data_flags
from tonle.cli.flags import ModelArgument
from tonle.cli.screen import show_error, stderr, stdout
from tonle.cli.slo_flags import with_slo_flags
from tonle.errors import ConfigError, TonleError

if TYPE_CHECKING:
    from tonle.tune.results import TuneResult

COULD_NOT_START = 2
INTERRUPTED = 130

_goal = partial(typer.Option, rich_help_panel="Goal", show_default=False)
_load = partial(typer.Option, rich_help_panel="Load", show_default=False)
_search = partial(typer.Option, rich_help_panel="Search", show_default=False)
_server = partial(typer.Option, rich_help_panel="Server", show_default=False)

_MAXIMIZE = (
    "goodput (requests per second that keep the SLO) or throughput (output tokens per second). Default: goodput."
)
_ALLOW = (
    "Also try what changes answers: kv-dtype (keys and values in 8 bits), quantization (weights in 8 or 4 bits); or speculation "
    "(without guesses)."
)
_VALUES = "Try these values of a setting: max_num_seqs=8,16,32; none (max_num_seqs=) leaves it alone. Repeat the flag for more."
_COMMAND = (
    'What starts the server: "vllm serve MODEL …". Flags that are searched are added, and --port. With --server other, the '
    "command has places in braces for the port and for values given with --values NAME=DEFAULT,SECOND,… (docs/tuning.md)."
)
_OUT = "Folder for measurements and results; the same command with the same folder goes on. Default: tuning-DATE."


class ServerName(enum.StrEnum):
    tonle = "tonle"
    vllm = "vllm"
    other = "other"


class MaximizeName(enum.StrEnum):
    goodput = "goodput"
    throughput = "throughput"


class DeviceName(enum.StrEnum):
    cpu = "cpu"
    cuda = "cuda"


@with_slo_flags
@with_data_flags(before="budget")
def tune(
    slo: Slo,
    data: dict[str, Any],
    model: ModelArgument = None,
    maximize: Annotated[MaximizeName, _goal(metavar="NAME", help=_MAXIMIZE)] = MaximizeName.goodput,
    concurrency: Annotated[
        int | None,
        _load(metavar="N", help="So many users, each waiting for an answer before the next request. Default: 16."),
    ] = None,
    rate: Annotated[float | None, _load(metavar="N", help="So many requests per second, arriving at random.")] = None,
    requests: Annotated[
        int | None, _load(metavar="N", help="Requests per measurement. Default: as many as the budget allows.")
    ] = None,
    budget: Annotated[
        str, _search(metavar="TIME", help="All the time it may take: 10m (the default), 40m, 2h.")
    ] = "10m",
    out: Annotated[Path | None, _search(metavar="DIR", help=_OUT)] = None,
    profile: Annotated[
        str | None,
        _search(metavar="FILE|NAME", help="Step times from `tonle profile`. Default: they are measured first."),
    ] = None,
    allow: Annotated[str | None, _search(metavar="NAME,...", help=_ALLOW)] = None,
    values: Annotated[list[str] | None, _search(metavar="NAME=V,V", help=_VALUES)] = None,
    seed: Annotated[int, _search(metavar="N", help="Of prompts and search. Default: 0.")] = 0,
    config: Annotated[
        Path | None, _server(metavar="FILE", help="Settings for `tonle serve` that stay as they are.")
    ] = None,
    server: Annotated[
        ServerName, _server(metavar="NAME", help="tonle (the default), vllm, or other.")
    ] = ServerName.tonle,
    command: Annotated[str | None, _server(metavar="TEXT", help=_COMMAND)] = None,
    device: Annotated[
        DeviceName | None,
        _server(metavar="NAME", help="Of vLLM or another server: cpu or cuda. Default: cuda if there is a GPU."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="Print the result only.")] = False,
) -> None:
    """Find settings of a server for your load and your SLO: simulated, measured, and confirmed against the default.

    [dim]Example:[/dim]  tonle tune --preset chat --concurrency 32 --ttft-p95 500ms --itl-p99 50ms --budget 10m

    Exit status: 0 there is a result (which may be: keep the default), 2 could not start, 130 stopped with Ctrl-C.
    """
    try:
        from tonle.tune.objective import Goal
        from tonle.tune.options import TuneOptions
        from tonle.tune.space import parse_values
        from tonle.tune.tuning import run_tune

        options = TuneOptions(
            bench=BenchOptions(**data, **_load_of(concurrency, rate, data), requests=requests),
            goal=Goal(slo, maximize.value),
            out=out or Path(f"tuning-{date.today().isoformat()}"),
            budget_s=_seconds(budget),
            model=model,
            server=server.value,
            command=command,
            profile=profile,
            allow=tuple(part.strip() for part in (allow or "").split(",") if part.strip()),
            values=parse_values(values or ()),
            config=config,
            device=None if device is None else device.value,
            seed=seed,
        )
        console = stderr()
        result = run_tune(options, (lambda text: None) if quiet else lambda text: console.print(text, markup=False))
    except TonleError as error:
        show_error(error)
        raise typer.Exit(COULD_NOT_START) from None
    _show(result, options.out)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def _load_of(concurrency: int | None, rate: float | None, data: dict[str, Any]) -> dict[str, Any]:
    if concurrency is not None and rate is not None:
        raise ConfigError("give --concurrency (closed loop) or --rate (open loop), not both", param="rate")
    if rate is not None:
        return {"rates": (rate,)}
    return {} if data.get("replay") is not None else {"concurrency": (16 if concurrency is None else concurrency,)}


def _seconds(text: str) -> float:
    """`10m`, `2h`, `90s`."""
    if text.strip().replace(".", "", 1).isdigit():
        raise ConfigError(
            f"--budget {text} has no unit: write {text}m for minutes or {text}s for seconds", param="budget"
        )
    return parse_duration_ms(text, "--budget") / 1e3


def _show(result: TuneResult, out: Path) -> None:
    from tonle.tune.results import headline, how_known
    from tonle.tune.space import notes_of_answers

    console = stdout()
    console.print()
    console.print(headline(result), markup=False)
    if result.verdict is not None:
        console.print(result.verdict.sentence, markup=False)
    for note in notes_of_answers(result.settings):
        console.print(f"note: {note}", markup=False)
    if result.safe is not None:
        known = (
            f"{result.safe.text}{how_known(result.safe)}"
            if result.safe.value
            else "none: the SLO holds at no load that was tried, or requests come faster than they are answered"
        )
        console.print(f"Safe load: {known}", markup=False)
    best = "best.yaml" if result.inputs.server == "tonle" else "best.sh"
    start = f"tonle serve --config {out / best}" if result.inputs.server == "tonle" else f"sh {out / best}"
    console.print(f"Start it:  {start}", markup=False)
    console.print(f"Report:    {out / 'report.html'}", markup=False)
    if result.limits is not None:
        console.print(f"Gateway:   tonle gateway --config {out / 'gateway.yaml'}", markup=False)
