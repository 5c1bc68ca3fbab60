"""`Side`: one side of a comparison at one load, its runs together, and the numbers found for it with their resamples.

Does: turn the rows of levels into estimates. Does not: compare or judge (`compare.py`), or make draws (`bootstrap.py`).

Throughput is resampled in a closed loop as tokens by seconds under way of the drawn requests: users are always busy, so that it
rises and falls with that. In an open loop the arrivals are given; there the time of the level is cut into windows, which are
drawn instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tonle.bench.bootstrap import Counts, Floats, draw_counts, resampled_percentiles, resampled_ratio
from tonle.bench.kinds.metrics import METRICS, Quantity, RequestKind
from tonle.bench.measure import LevelReport, RequestRow

Unit = Literal["per_s", "ms", "s", "×", "share", "GiB"]
Better = Literal["lower", "higher"]

PERCENTS: tuple[float, ...] = (50, 95, 99)
NUM_WINDOWS = 20  # of a level in an open loop
MIN_REQUESTS = 10  # fewer say nothing about a level
GIB = 2**30
MIN_BEYOND = 2  # values beyond a percentile, so that it is not just the largest one: p95 takes 40, p99 200


@dataclass(frozen=True, slots=True)
class Estimate:
    """One number of a side. `resampled` None: its runs have no rows."""

    unit: Unit
    better: Better
    value: float | None
    resampled: Floats | None
    enough: bool  # requests, to judge it


class Side:
    """Owns the rows of one load's levels, one level of each run."""

    def __init__(
        self, levels: Sequence[LevelReport], percents: Sequence[float] = PERCENTS, kind: RequestKind = "chat"
    ) -> None:
        self._levels = levels
        self._kind = kind
        self._metrics = METRICS[kind]
        self._percents = percents
        # Rows stand in the order in which requests ended; by their number those of two runs are paired.
        self._rows_of_levels = [sorted(level.rows or [], key=lambda row: row.index) for level in levels]
        self._rows = [row for rows in self._rows_of_levels for row in rows]
        self.has_rows = all(level.rows is not None for level in levels) and bool(self._rows)
        self.requests = sum(level.requests for level in levels)
        self._answered = [row.failure is None for row in self._rows]

    @property
    def sizes(self) -> list[int]:
        """Requests of each run."""
        return [len(rows) for rows in self._rows_of_levels]

    @property
    def bounds(self) -> set[str]:
        """Of the SLO that goodput is counted by."""
        return {str(result.bound) for level in self._levels for result in level.slo}

    def sends_the_same_as(self, other: Side) -> bool:
        """One run each, whose requests of the same number have prompts of the same length: the same seed was used."""
        if len(self._levels) != 1 or len(other._levels) != 1 or not self.has_rows:
            return False
        mine, theirs = ([(row.index, self._length(row)) for row in side._rows] for side in (self, other))
        return mine == theirs and any(length is not None for _, length in mine)

    def _length(self, row: RequestRow) -> float | None:
        """Of what was sent: tokens of a prompt, seconds of a sound; None: it is not known."""
        return row.audio_s if self._kind == "asr" else row.prompt_tokens

    def estimates(self, counts: Counts, rng: np.random.Generator) -> dict[str, Estimate]:
        """Every number of this side by its name. counts [resamples, requests]."""
        return {
            "requests/s": self._flow([float(ok) for ok in self._answered], counts, rng, "succeeded"),
            **dict(self._rates(counts, rng)),
            **self._goodput(counts, rng),
            **dict(self._latencies(counts)),
            "failed": self._failed(counts),
            **self._gpus(),
        }

    def _rates(self, counts: Counts, rng: np.random.Generator) -> Iterator[tuple[str, Estimate]]:
        for rate in self._metrics.rates:
            if all(rate.of(level) is not None for level in self._levels):
                amounts = [
                    (getattr(row, rate.amount) or 0.0) * ok for row, ok in zip(self._rows, self._answered, strict=True)
                ]
                yield rate.name, self._flow(amounts, counts, rng, rate.total)

    def _goodput(self, counts: Counts, rng: np.random.Generator) -> dict[str, Estimate]:
        if any(level.goodput_per_s is None for level in self._levels):
            return {}
        found = self._flow([float(bool(row.good)) for row in self._rows], counts, rng, None)
        return {"goodput/s": found}

    def _flow(self, amounts: list[float], counts: Counts, rng: np.random.Generator, total: str | None) -> Estimate:
        """Something per second. `amounts` of each request; `total` is the level's own sum of them, None: that of goodput."""
        duration_s = math.fsum(level.duration_s for level in self._levels)
        done = sum(
            getattr(level, total) if total else (level.goodput_per_s or 0) * level.duration_s for level in self._levels
        )
        value = done / duration_s if duration_s else 0.0
        if not self.has_rows:
            return Estimate("per_s", "higher", value, None, enough=False)
        if all(level.concurrency is not None for level in self._levels):
            times = np.array([(row.e2el_ms or 0.0) / 1e3 for row in self._rows])
            resampled, ratio = resampled_ratio(np.array(amounts), times, counts), sum(amounts) / max(times.sum(), 1e-9)
        else:
            windows, widths, sizes = self._windows(amounts)
            resampled = resampled_ratio(windows, widths, draw_counts(rng, sizes, len(counts)))
            ratio = windows.sum() / max(widths.sum(), 1e-9)
        # The level's own rate, which varies as the resamples vary around theirs.
        scaled = resampled * (value / ratio) if ratio else np.zeros(len(counts))
        return Estimate("per_s", "higher", value, scaled, enough=self.requests >= MIN_REQUESTS)

    def _windows(self, amounts: list[float]) -> tuple[Floats, Floats, list[int]]:
        """What ended in each window of time, the windows' seconds, and how many each run has."""
        sums, widths, begin = [], [], 0
        for level, rows in zip(self._levels, self._rows_of_levels, strict=True):
            ends_s = [row.start_s + (row.e2el_ms or 0.0) / 1e3 for row in rows]
            edges = np.linspace(0, max([level.duration_s, *ends_s]) + 1e-9, NUM_WINDOWS + 1)
            found, _ = np.histogram(ends_s, edges, weights=amounts[begin : begin + len(rows)])
            sums.append(found)
            widths.append(np.diff(edges))
            begin += len(rows)
        return np.concatenate(sums), np.concatenate(widths), [NUM_WINDOWS] * len(self._levels)

    def _latencies(self, counts: Counts) -> Iterator[tuple[str, Estimate]]:
        for quantity in self._metrics.quantities:
            # Where more is better, the bad end is the low one: p5 and p1.
            percents = [100 - percent if quantity.more_is_better else percent for percent in self._percents]
            values = [np.array(quantity.values(row), np.float64) for row in self._rows]
            resampled = resampled_percentiles(values, counts, percents) if self.has_rows else None
            pooled = np.concatenate(values) if values else np.zeros(0)
            for column, percent in enumerate(percents):
                beyond = pooled.size * min(percent, 100 - percent) / 100
                exact = float(np.percentile(pooled, percent)) if self.has_rows and pooled.size else None
                yield (
                    f"{quantity.name} p{percent:g}",
                    Estimate(
                        quantity.unit, "higher" if quantity.more_is_better else "lower",
                        self._saved(quantity, percent) if exact is None else exact,
                        None if resampled is None else resampled[:, column],
                        enough=self.requests >= MIN_REQUESTS and beyond >= MIN_BEYOND,
                    ),
                )  # fmt: skip

    def _saved(self, quantity: Quantity, percent: float) -> float | None:
        """Without rows: what the level's summary says; several summaries cannot be put together."""
        spread = quantity.of(self._levels[0]) if len(self._levels) == 1 else None
        saved: float | None = getattr(spread, f"p{percent:g}", None)  # of no summary, or not in it: None
        return saved

    def _gpus(self) -> dict[str, Estimate]:
        """Where they were read. They are of the whole level: no request has a share of them, so there is no interval."""
        found = {}
        uses = [level.gpu_use for level in self._levels]
        memories = [level.gpu_memory for level in self._levels]
        if known := [use for use in uses if use is not None]:
            found["GPU use"] = Estimate("share", "lower", math.fsum(known) / len(known), None, enough=False)
        if most := [memory for memory in memories if memory is not None]:
            found["GPU memory"] = Estimate("GiB", "lower", max(most) / GIB, None, enough=False)
        return found

    def _failed(self, counts: Counts) -> Estimate:
        value = sum(level.failed for level in self._levels) / self.requests if self.requests else 0.0
        if not self.has_rows:
            return Estimate("share", "lower", value, None, enough=False)
        failed = np.array([float(not ok) for ok in self._answered])
        resampled = resampled_ratio(failed, np.ones(len(failed)), counts)
        return Estimate("share", "lower", value, resampled, enough=self.requests >= MIN_REQUESTS)
