"""Numbers that charts are drawn from: percentiles of a distribution, and a level over time.

Does: thin out thousands of requests to what a screen can show, and say how. Does not: draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tonle.bench.bootstrap import Floats
from tonle.bench.kinds.metrics import METRICS, Quantity, Rate
from tonle.bench.measure import LevelReport, RequestRow

PERCENTS = (*range(100), 99.5, 99.9, 100)
MAX_LANES = 240  # requests of a waterfall
MAX_KEPT = 24  # of them, that many of the slowest, and of those that failed
TIME_CELLS, GAP_CELLS = 120, 36  # of the heat of gaps
NUM_STEPS = 160  # of the lines over time
LANE_PIECES = 48  # of a lane: each has the color of its longest gap
HEAT_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def values_of(level: LevelReport, quantity: Quantity) -> list[float]:
    """Of all answered requests; gaps of all of them together."""
    return [value for row in level.rows or [] for value in quantity.values(row)]


def quantiles(values: Sequence[float]) -> list[float] | None:
    """At `PERCENTS`; None if there are no values."""
    return [round(float(value), 4) for value in np.percentile(values, PERCENTS)] if values else None


def timeline(level: LevelReport, rate: Rate = METRICS["chat"].throughput) -> dict[str, Any] | None:
    """What `script.js` draws of a level; None without rows."""
    rows = sorted(level.rows or [], key=lambda row: row.start_s)
    if not rows:
        return None
    duration_s = max(level.duration_s, *(_end_s(row) for row in rows), 1e-3)
    lanes = _chosen(rows)
    gaps = [gap for row in rows for gap in row.itl_ms if gap > 0]
    low_ms, high_ms = _span(gaps)
    return {
        "duration": round(duration_s, 4),
        "requests": len(rows),
        "gaps": [low_ms, high_ms],
        "steps": _steps(rows, duration_s, rate),
        "heat": _heat(rows, duration_s, low_ms, high_ms),
        "lanes": [_lane(row, low_ms, high_ms) for row in lanes],
    }


def _end_s(row: RequestRow) -> float:
    return row.start_s + (row.e2el_ms or row.ttft_ms or 0.0) / 1e3


def _span(gaps: list[float]) -> tuple[float, float]:
    """From a round number below the gaps to one above, milliseconds. One gap in a thousand may be shorter."""
    if not gaps:
        return 1.0, 10.0
    low, high = float(np.percentile(gaps, 0.1)), max(gaps)
    low = max(low, high / 1e5, 1e-3)
    return float(f"{low * 0.95:.2g}"), float(f"{max(high, low * 2) * 1.05:.3g}")


def _moments(row: RequestRow) -> Floats:
    """When its chunks arrived, in seconds of the level."""
    if row.ttft_ms is None:
        return np.zeros(0)
    return row.start_s + (row.ttft_ms + np.concatenate([[0.0], np.cumsum(row.itl_ms)])) / 1e3


def _steps(rows: list[RequestRow], duration_s: float, rate: Rate) -> dict[str, list[float]]:
    """Throughput, and mean requests that wait for a first token or get tokens, in equal steps of time. What comes in one piece
    counts when it has come."""
    edges = np.linspace(0, duration_s, min(NUM_STEPS, max(24, 2 * len(rows))) + 1)
    width_s = edges[1]
    tokens = np.zeros(len(edges) - 1)
    waiting, running = np.zeros_like(tokens), np.zeros_like(tokens)
    for row in rows:
        moments = _moments(row)
        if moments.size:
            if row.output_tokens:
                tokens += np.histogram(np.clip(moments, 0, duration_s), edges)[0] * (row.output_tokens / moments.size)
            first_s = float(moments[0])
            running += _overlap(edges, first_s, _end_s(row))
        else:
            first_s = _end_s(row)
        if rate.amount != "output_tokens" and row.failure is None:
            tokens += np.histogram([min(_end_s(row), duration_s)], edges)[0] * (getattr(row, rate.amount) or 0)
        waiting += _overlap(edges, row.start_s, first_s)
    found = {"tokens": tokens / width_s, "waiting": waiting / width_s, "running": running / width_s}
    return {name: [round(float(value), 2) for value in values] for name, values in found.items()}


def _overlap(edges: Floats, begin_s: float, end_s: float) -> Floats:
    """Seconds of each step between two moments."""
    found: Floats = np.maximum(0.0, np.minimum(edges[1:], end_s) - np.maximum(edges[:-1], begin_s))
    return found


def _heat(rows: list[RequestRow], duration_s: float, low_ms: float, high_ms: float) -> list[int]:
    """How many gaps ended in each cell of time and size (logarithmic): column, row, count of those that have any."""
    ends, sizes = [], []
    for row in rows:
        if row.itl_ms:
            ends.append(_moments(row)[1:])
            sizes.append(np.maximum(row.itl_ms, low_ms))
    if not ends:
        return []
    columns = np.clip(np.concatenate(ends) / duration_s * TIME_CELLS, 0, TIME_CELLS - 1).astype(int)
    share = np.log(np.concatenate(sizes) / low_ms) / math.log(high_ms / low_ms)
    lines = np.clip(share * GAP_CELLS, 0, GAP_CELLS - 1).astype(int)
    counts = np.bincount(columns * GAP_CELLS + lines, minlength=TIME_CELLS * GAP_CELLS)
    return [
        int(number) for cell in np.flatnonzero(counts) for number in (cell // GAP_CELLS, cell % GAP_CELLS, counts[cell])
    ]


def _chosen(rows: list[RequestRow]) -> list[RequestRow]:
    """All rows, or those that failed, the slowest, and of the rest every so-manyth, in their order."""
    if len(rows) <= MAX_LANES:
        return rows
    kept = {id(row) for row in [row for row in rows if row.failure is not None][:MAX_KEPT]}
    for name in ("ttft_ms", "e2el_ms"):
        slowest = sorted(rows, key=lambda row: -(getattr(row, name) or 0.0))
        kept |= {id(row) for row in slowest[: MAX_KEPT // 2]}
    rest = [row for row in rows if id(row) not in kept]
    step = len(rest) / (MAX_LANES - len(kept))
    kept |= {id(rest[int(place * step)]) for place in range(MAX_LANES - len(kept))}
    return [row for row in rows if id(row) in kept]


def _lane(row: RequestRow, low_ms: float, high_ms: float) -> list[Any]:
    """Number, start, delay, TTFT, E2EL, tokens (prompt, cached, output), ITL p50 and max, colors, good, words."""
    gaps = row.itl_ms
    words = {
        "failure": row.failure, "finish": row.finish_reason, "record": row.record, "changed": row.changed,
        "conversation": None if row.conversation is None else f"{row.conversation}, turn {row.turn}",
        "items": None if row.items is None else str(row.items),
        "audio": None if row.audio_s is None else f"{row.audio_s:.2f} s",
    }  # fmt: skip
    return [
        row.index, row.start_s, row.delay_ms, row.ttft_ms, row.e2el_ms, row.prompt_tokens, row.cached_tokens, row.output_tokens,
        round(float(np.median(gaps)), 3) if gaps else None, max(gaps, default=None), _colors(gaps, low_ms, high_ms), row.good,
        {name: text for name, text in words.items() if text},
    ]  # fmt: skip


def _colors(gaps: list[float], low_ms: float, high_ms: float) -> str:
    """A digit (base 36) per piece of the decoding time: how long its longest gap is, on the scale of the heat."""
    if not gaps or sum(gaps) <= 0:
        return ""
    pieces = np.zeros(min(LANE_PIECES, len(gaps)))
    ends = np.cumsum(gaps) / sum(gaps) * len(pieces)
    begins = np.concatenate([[0.0], ends[:-1]])
    for gap, begin, end in zip(gaps, begins, ends, strict=True):
        first = min(int(begin), len(pieces) - 1)
        last = max(first + 1, math.ceil(end))
        pieces[first:last] = np.maximum(pieces[first:last], gap)
    share = np.log(np.maximum(pieces, low_ms) / low_ms) / math.log(high_ms / low_ms)
    return "".join(HEAT_DIGITS[int(place)] for place in np.clip(share * 36, 0, 35))
