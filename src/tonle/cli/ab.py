"""`tonle ab`: what an experiment has shown so far, read from the audit trail."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tonle.cli import screen
from tonle.errors import ConfigError

if TYPE_CHECKING:
    from tonle.gateway.comparison import ArmResult, Comparison


class Action(enum.StrEnum):
    report = "report"


def ab(
    action: Annotated[Action, typer.Argument(metavar="ACTION", help="What to do: report.", show_default=False)],
    audit_dir: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder with the audit records.", show_default=False)
    ],
    experiment: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which one. Default: the only one there is.")
    ] = None,
    control: Annotated[
        str | None, typer.Option(metavar="NAME", help="The arm others are compared with. Default: the largest.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """Compare the arms of an experiment, from the audit trail.

    Failure rates are compared with a two-proportion z-test, latencies and lengths with Welch's t-test.

    [dim]Example:[/dim]  tonle ab report audit --experiment new-adapter
    """
    from tonle.gateway.comparison import compare, gather

    del action  # there is one
    if not audit_dir.is_dir():
        raise ConfigError(f"there is no folder {audit_dir}", param="audit_dir")
    records = list(_records(audit_dir))
    name = experiment or _only_experiment(records)
    arms = gather(records, name)
    if not arms:
        raise ConfigError(f"no record in {audit_dir} belongs to the experiment {name!r}", param="experiment")
    first = control or max(arms.values(), key=lambda arm: arm.num_requests).name
    if first not in arms:
        raise ConfigError(f"there is no arm {first!r}; there are: {', '.join(arms)}", param="control")
    comparisons = compare(arms, first)
    if as_json:
        typer.echo(json.dumps(_facts(name, first, arms, comparisons), indent=2))
    else:
        _show(name, first, arms, comparisons)


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*/*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # `tonle audit verify` tells of those
        if isinstance(record, dict) and "status" in record:
            yield record


def _only_experiment(records: list[dict[str, Any]]) -> str:
    names = sorted({record["experiment"]["name"] for record in records if record.get("experiment")})
    if len(names) == 1:
        return str(names[0])
    if not names:
        raise ConfigError("no record belongs to an experiment", param="experiment")
    raise ConfigError(f"choose one with --experiment: {', '.join(names)}", param="experiment")


def _facts(name: str, control: str, arms: dict[str, ArmResult], comparisons: list[Comparison]) -> dict[str, Any]:
    from tonle.gateway.comparison import mean

    return {
        "experiment": name,
        "control": control,
        "arms": {
            arm.name: {
                "requests": arm.num_requests,
                "failed": arm.num_failed,
                **{measure: mean(values) for measure, values in arm.measures.items()},
            }
            for arm in arms.values()
        },
        "comparisons": [
            {"arm": each.arm, "measure": each.measure, "control": each.control, "value": each.value,
             "p_value": each.p_value, "significant": each.significant}
            for each in comparisons
        ],
    }  # fmt: skip


def _show(name: str, control: str, arms: dict[str, ArmResult], comparisons: list[Comparison]) -> None:
    out = screen.stdout()
    counts = ", ".join(f"{arm.name} {arm.num_requests}" for arm in arms.values())
    out.print(f"Experiment [bold]{name}[/bold], requests: {counts}. Compared with {control}:\n")
    table = Table("arm", "measure", control, "arm's", "change", "p", "verdict", box=None)
    for each in comparisons:
        change = f"{(each.value / each.control - 1) * 100:+.1f} %" if each.control else "-"
        p_value = "-" if each.p_value is None else f"{each.p_value:.4f}"
        verdict = "[bold]differs[/bold]" if each.significant else "too few" if each.p_value is None else "may be chance"
        table.add_row(each.arm, each.measure, f"{each.control:.4g}", f"{each.value:.4g}", change, p_value, verdict)
    out.print(table)
    if comparisons:
        out.print(
            f"\nA difference counts below p = {comparisons[0].threshold:.4f} "
            f"(0.05 over {round(0.05 / comparisons[0].threshold)} tests)."
        )
