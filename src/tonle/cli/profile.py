"""`tonle profile`: measure for a minute how long the steps of a server take, for simulations. Never loads torch itself.

Exit status: 0 the profile was written · 2 it could not start · 130 stopped with Ctrl-C, and nothing was written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonle.cli import screen
from tonle.errors import ConfigError, TonleError

if TYPE_CHECKING:
    from rich.table import Table

    from tonle.simulate.profile import Profile
    from tonle.simulate.profile_loads import Told

COULD_NOT_START = 2
_WORTH_A_LINE = 0.01  # of the time
_POOR = 0.12  # median error of single steps; on a quiet machine 0.03 to 0.07

# What the table of expected times shows: rows, prompts, tokens, context of each row, tokens before each chunk.
_EXAMPLES = {
    "decode, 1 row, 256 tokens before": (1, 0, 0, 256, 0),
    "decode, 8 rows": (8, 0, 0, 256, 0),
    "decode, 32 rows": (32, 0, 0, 256, 0),
    "decode, 256 rows": (256, 0, 0, 256, 0),
    "a prompt of 64 tokens": (0, 1, 64, 0, 0),
    "a prompt of 256 tokens": (0, 1, 256, 0, 0),
    "256 tokens of a prompt beside 16 rows": (16, 1, 256, 256, 0),
}


def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="As `tonle serve` takes it. Default: the default model.", show_default=False
        ),
    ] = None,
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- FLAGS", help="Flags of `tonle serve`, after two dashes.", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write it.")] = Path(
        "profile.json"
    ),
    seconds: Annotated[
        float, typer.Option(metavar="N", help="How long to measure, without the server's start.")
    ] = 60.0,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Measure this server instead, which runs on this machine with --step-log."),
    ] = None,
    step_log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --url: the file that server was given with --step-log.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE", help="Show the times of this profile beside it: a file, or the name of a shipped one."
        ),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the server's log and the step log in this folder.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed sends other prompts.")] = 0,
    clients: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Processes that send requests. Default: 1 beside a CPU; up to 6 beside a GPU, as the machine has cores.",
        ),
    ] = None,
) -> None:
    """Measure how long the steps of a server take, for `tonle simulate` and `tonle tune`.

    Starts `tonle serve`, sends it loads that spread what its steps compute, and fits a model of step times to what it
    logged. Keep the machine quiet meanwhile.

    [dim]Example:[/dim]  tonle profile Qwen/Qwen2.5-0.5B-Instruct -o qwen.json -- --max-num-seqs 64

    Exit status: 0 written, 2 could not start, 130 stopped with Ctrl-C.
    """
    from tonle.simulate.profile import load_profile, save_profile
    from tonle.simulate.run_profile import profile_running, run_profile

    if model is not None and model.startswith("-"):  # `tonle profile -- --max-num-seqs 8`
        flags = [model, *(flags or [])]
        model = None
    try:
        _check(model, flags, url, step_log, seconds)
        _check_writable(output)
        other = None if compare is None else load_profile(compare)
        with _progress() as tell:
            if url is not None and step_log is not None:
                found = profile_running(url, step_log, seconds=seconds, seed=seed, clients=clients, tell=tell)
            else:
                found = run_profile(
                    model, flags or (), seconds=seconds, seed=seed, clients=clients, keep=keep, tell=tell
                )
        save_profile(found, output)
    except TonleError as error:
        screen.show_error(error)
        raise typer.Exit(COULD_NOT_START) from None
    _show(found, other, compare)
    screen.stdout().print(f"\nWritten to [bold]{output}[/bold].")


def _check(model: str | None, flags: list[str] | None, url: str | None, step_log: Path | None, seconds: float) -> None:
    if (url is None) != (step_log is None):
        raise ConfigError(
            "--url and --step-log go together: a server that runs, and the step log it writes", param="url"
        )
    if url is not None and (model is not None or flags):
        raise ConfigError("MODEL and flags are for a server that is started; --url names one that runs", param="url")
    if not 1 <= seconds <= 3600:
        raise ConfigError(f"--seconds must be between 1 and 3600, not {seconds:g}", param="seconds")
    taken = {"--port", "--host", "--step-log", "--api-key", "--ssl-certfile"}
    if wrong := [flag for flag in flags or () if flag.split("=")[0] in taken]:
        raise ConfigError(f"{wrong[0]} does not go with a profile, which starts the server for itself", param="flags")


def _check_writable(path: Path) -> None:
    """Before a minute is spent. Raises `ConfigError`."""
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} to write {path.name} to", param="output")
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: name a file in a folder that can be written to", param="output")


@contextmanager
def _progress() -> Iterator[Told]:
    """A line that is rewritten on a terminal; elsewhere one line per load."""
    console = screen.stderr()
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda label, share: status.update(f"{label}  [dim]{share:.0%}[/dim]")
        return
    last = ""

    def tell(label: str, share: float) -> None:
        nonlocal last
        kind = label.split(",")[0]
        if kind != last:
            last = kind
            console.print(f"{share:4.0%}  {kind}", markup=False)

    yield tell


def _show(found: Profile, other: Profile | None, other_name: str | None) -> None:
    out = screen.stdout()
    server, times = found.server, found.times
    out.print(
        f"[bold]{server.model}[/bold] on {server.device_name}, {server.dtype}: up to {server.max_num_seqs} rows and "
        f"{server.max_num_batched_tokens} tokens in a step, {server.num_blocks * server.block_size:,} tokens of KV cache."
    )
    out.print(
        f"Around steps: {_ms(times.front_s)} until the engine has a request, {_ms(times.back_s)} from a token to the "
        "client.\n"
    )
    if found.left_out >= _WORTH_A_LINE:
        out.print(
            f"Left out: {found.left_out:.0%} of the steps' time, in which this machine's processors were slower, or steps took "
            "longer than the same steps at other times, as if others used the machine. What is simulated is this machine "
            "undisturbed.\n"
        )
    if found.fits:
        out.print(_fit_table(found))
    else:
        out.print("There are too few steps to hold some out and judge the fit by them: measure for longer (--seconds).")
    for note in found.notes:
        out.print(f"\n[yellow]{note[0].upper()}{note[1:]}.[/yellow]")
    if any(fit.kind == "all" and fit.median_error > _POOR for fit in found.fits):
        out.print(
            "\n[yellow]These steps took now less, now more than their kind does: did other programs run on this machine? "
            "Simulations will be as far off. Measure again when it is quiet, or for longer (--seconds 180).[/yellow]"
        )
    out.print()
    out.print(_time_table(found, other, other_name))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _fit_table(found: Profile) -> Table:
    from rich.table import Table

    table = Table(title="The fit, on steps it was not fitted to", title_justify="left", box=None)
    table.add_column("steps")
    for name in ("n", "median error", "p90 error", "error of the sum"):
        table.add_column(name, justify="right")
    for fit in found.fits:
        table.add_row(
            fit.kind, f"{fit.steps:,}", f"{fit.median_error:.1%}", f"{fit.p90_error:.1%}", f"{fit.total_error:+.1%}"
        )
    return table


def _time_table(found: Profile, other: Profile | None, other_name: str | None) -> Table:
    from rich.table import Table

    from tonle.engine.schedule.step_facts import StepWork

    table = Table(title="Expected times", title_justify="left", box=None)
    table.add_column("step")
    for name in ("ms", *((other_name or "", "ratio") if other else ())):
        table.add_column(name, justify="right")
    for label, (rows, prompts, tokens, context, before) in _EXAMPLES.items():
        if rows > found.server.max_num_seqs or rows + tokens > found.server.max_num_batched_tokens:
            continue
        work = StepWork(rows, prompts, tokens, rows * context, tokens * (before + tokens // 2), rows + prompts)
        own = found.times.device_s(work)
        cells = [f"{own * 1e3:.3g}"]
        if other is not None:
            theirs = other.times.device_s(work)
            cells += [f"{theirs * 1e3:.3g}", f"{own / theirs:.2f}"]
        table.add_row(label, *cells)
    return table
