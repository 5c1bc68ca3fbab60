"""`tonle ab`: the results of an A/B experiment, read from the audit trail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tonle.cli import screen
from tonle.errors import ConfigError

if TYPE_CHECKING:
    from tonle.gateway.comparison import ArmResult, Comparison


ab = typer.Typer(
    name="ab",
    help="Compare the arms of an A/B experiment, from the audit trail.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@ab.callback()
def _group() -> None:
    """With this, typer keeps `report` as a subcommand though it is the only one."""


@ab.command("report")
def report(
    audit_dir: Annotated[Path, typer.Argument(metavar="DIR", help="The audit directory.", show_default=False)],
    experiment: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which experiment. Default: the only one there is.")
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The arm to compare the others with. Default: the one with the most requests."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """Compare the arms of an experiment.

    Failure rates are compared with a two-proportion z-test, latencies and lengths with Welch's t-test. Intervals of differences
    are at 95 %: Newcombe's of rates, Welch's of means.

    [dim]Example:[/dim]  tonle ab report audit --experiment new-adapter
    """
    from tonle.gateway.comparison import compare, gather

    if not audit_dir.is_dir():
        raise ConfigError(f"there is no directory {audit_dir}", param="audit_dir")
    records = list(_records(audit_dir))
    name = experiment or _only_experiment(records, audit_dir)
    arms = gather(records, name)
    if not arms:
        raise ConfigError(f"no record in {audit_dir} belongs to the experiment {name!r}", param="experiment")
    first = control or max(arms.values(), key=lambda arm: arm.num_requests).name
    if first not in arms:
        raise ConfigError(f"there is no arm {first!r}; the arms are {', '.join(arms)}", param="control")
    comparisons = compare(arms, first)
    if as_json:
        typer.echo(json.dumps(_facts(name, first, arms, comparisons), indent=2))
    else:
        _show(name, first, arms, comparisons)


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    from tonle.audit.record_file import MAX_RECORD_BYTES
    from tonle.audit.regular_file import read_regular

    for path in sorted(folder.glob("*/*.json")):
        try:
            record = json.loads(read_regular(path, MAX_RECORD_BYTES))
        except (OSError, ValueError, RecursionError):
            continue  # `tonle audit verify` reports those
        if isinstance(record, dict) and "status" in record:
            yield record


def _only_experiment(records: list[dict[str, Any]], folder: Path) -> str:
    names = sorted({record["experiment"]["name"] for record in records if record.get("experiment")})
    if len(names) == 1:
        return str(names[0])
    if not names:
        raise ConfigError(f"no record in {folder} belongs to an experiment", param="experiment")
    raise ConfigError(f"there are several; choose one with --experiment: {', '.join(names)}", param="experiment")


def _facts(name: str, control: str, arms: dict[str, ArmResult], comparisons: list[Comparison]) -> dict[str, Any]:
    from tonle.gateway.experiments import shown_comparison

    return {
        "experiment": name,
        "control": control,
        "arms": {
            arm.name: {
                "requests": arm.num_requests,
                "failed": arm.num_failed,
                **{measure: found.mean for measure, found in arm.measures.items()},
            }
            for arm in arms.values()
        },
        "comparisons": [shown_comparison(each) for each in comparisons],
    }


def _show(name: str, control: str, arms: dict[str, ArmResult], comparisons: list[Comparison]) -> None:
    out = screen.stdout()
    counts = ", ".join(f"{arm.name} {arm.num_requests}" for arm in arms.values())
    out.print(f"Experiment [bold]{escape(name)}[/bold], requests: {escape(counts)}. Compared with {escape(control)}:\n")
    table = Table(
        "arm", "measure", escape(control), "this arm", "difference", "95 % interval", "change", "p", "verdict", box=None
    )
    for each in comparisons:
        change = f"{(each.value / each.control - 1) * 100:+.1f} %" if each.control else "-"
        p_value = "-" if each.p_value is None else f"{each.p_value:.4f}"
        verdict = "too few requests" if each.interval is None else "could be chance"
        if each.significant:
            verdict = "[bold]different[/bold]"
        interval = "-" if each.interval is None else f"{each.interval[0]:+.4g} to {each.interval[1]:+.4g}"
        table.add_row(
            escape(each.arm), each.measure, f"{each.control:.4g}", f"{each.value:.4g}", f"{each.difference:+.4g}", interval,
            change, p_value, verdict,
        )  # fmt: skip
    out.print(table)
    if comparisons:
        out.print(
            f"\nA difference is significant if p is below {comparisons[0].threshold:.4f} "
            f"(0.05, divided by the number of tests: {round(0.05 / comparisons[0].threshold)})."
        )
