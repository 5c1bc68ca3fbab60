"""What a simulation adds to a benchmark's report, for human eyes: what each replica did, the cost, the fewest replicas."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tonle.bench.slo import Slo
from tonle.bench.tables import print_line
from tonle.simulate.levels import FewestReplicas, is_held
from tonle.simulate.result import ReplicaReport, SimulationResult

_MOST_ROWS = 16  # of replicas; more are summed up


def print_replicas(result: SimulationResult, console: Console, *, of: str | None = None) -> None:
    """`of`: the level, where there are several."""
    console.print()
    if of is not None:
        print_line(console, f"replicas at {of}")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1))
    table.add_column("replica", style="bold")
    for name in ("requests", "busy", "rows/step", "KV max", "cached", "preempted", "up s"):
        table.add_column(name, justify="right")
    for replica in result.replicas[:_MOST_ROWS]:
        table.add_row(*_row(replica))
    console.print(table)
    if len(result.replicas) > _MOST_ROWS:
        print_line(console, f"and {len(result.replicas) - _MOST_ROWS} more")
    counts = {count for _, count in result.counts}
    if len(counts) > 1:
        print_line(console, f"replicas that served at once: {min(counts)} to {max(counts)}")
    per_million = result.cost_per_million_tokens
    if per_million is not None:
        free = sum(replica.up_s > 0 and not replica.cost for replica in result.replicas)
        without = f"; {free} of {len(result.replicas)} replicas have no price and are not counted" if free else ""
        print_line(console, f"cost: {result.cost:.4g}, {per_million:.4g} per million output tokens{without}")
    print_line(
        console,
        f"simulated {result.duration_s:.1f} s in {result.wall_s:.2f} s: {result.speed:.0f} times as fast as real",
    )


def _row(replica: ReplicaReport) -> list[str]:
    seen = replica.prompt_tokens + replica.cached_tokens
    kind = "".join(f" {each}" for each in (replica.role, replica.length) if each != "any")
    return [
        escape(f"{replica.name}{kind}"),
        str(replica.requests),
        f"{replica.busy_share:.0%}",
        f"{replica.rows_per_step:.1f}",
        f"{replica.max_kv_usage:.0%}",
        f"{replica.cached_tokens / seen:.0%}" if seen else "–",
        str(replica.preemptions),
        f"{replica.up_s:.1f}",
    ]


def print_fewest(found: FewestReplicas, slo: Slo, console: Console) -> None:
    console.print()
    for count, each in sorted(found.levels):
        told = ", ".join(str(bound) for bound in each.level.slo)
        if each.level.failed:
            told += f", {each.level.failed} of {each.level.requests} requests failed"
        if each.is_overloaded:
            told += ", requests come faster than they are answered"
        print_line(
            console,
            f"{count:4} replica{'' if count == 1 else 's'}: {told}",
            style="green" if is_held(each) else "red",
        )
    if found.count is None:
        most = max(count for count, _ in found.levels)
        print_line(
            console, f"not even {most} replicas hold {slo}: their number is not what limits it", style="bold red"
        )
    else:
        noun = "replica holds" if found.count == 1 else "replicas hold"
        print_line(console, f"{found.count} {noun} {slo}", style="bold green")
