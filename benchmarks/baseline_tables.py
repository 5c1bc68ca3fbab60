"""The numbers of `baseline.py`, and its tables: those of a README that promises them, with what was measured.

Does: medians, ratios within a repeat, percentiles, rows of text. Does not: measure, or know engines.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.closed_loop import percentile

Row = tuple[str, ...]
PERCENTILES = (50, 95, 99)


def ratio(base: Sequence[float], ours: Sequence[float], *, more_is_better: bool = False) -> float:
    """How many times better ours is: the median over repeats, each compared with the other side's run in the same repeat."""
    pairs = zip(base, ours, strict=True)
    return statistics.median(own / other if more_is_better else other / own for other, own in pairs)


def improvement(gain: float, better: str, worse: str) -> str:
    """`2.7x faster`, or `1.4x slower`."""
    return f"{gain:.1f}x {better}" if gain >= 1 else f"{1 / gain:.1f}x {worse}"


def repeated_questions(num: int, share: float, make: Callable[[int], str]) -> list[str]:
    """`num` questions, of which about `share` were asked before: evenly spread, each the oldest that was not yet repeated."""
    questions: list[str] = []
    num_new = num_old = 0
    for place in range(num):
        if num_old + 1 <= share * (place + 1) and num_old < num_new:
            questions.append(make(num_old))
            num_old += 1
        else:
            questions.append(make(num_new))
            num_new += 1
    return questions


def latency_row(name: str, latencies_s: Sequence[float], hits: Sequence[bool]) -> Row:
    """`| Configuration | P50 | P95 | P99 | Cache hit |`"""
    figures = [seconds(percentile(list(latencies_s), share)) for share in PERCENTILES]
    return (name, *figures, f"{sum(hits) / len(hits):.0%}")


def breakdown_rows(parts_s: Mapping[str, float]) -> list[Row]:
    """Each part of one request's latency, and its share; the whole first."""
    total = sum(parts_s.values())
    rows = [("Total", seconds(total), "100.0%")]
    return rows + [(name, seconds(part), f"{part / total:.1%}") for name, part in parts_s.items()]


def at_percentile(latencies_s: Sequence[float], share: float) -> int:
    """Which request is the one at this percentile."""
    ordered = sorted(range(len(latencies_s)), key=lambda place: latencies_s[place])
    return ordered[min(len(ordered) - 1, round(share / 100 * (len(ordered) - 1)))]


def waste(needed_tokens: int, reserved_tokens: float) -> float:
    """Share of reserved places for keys and values that no token ever takes."""
    return 1 - needed_tokens / reserved_tokens


def seconds(value: float) -> str:
    """With the unit that suits it."""
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.2f} s"


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.3g} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.3g} GiB"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"
