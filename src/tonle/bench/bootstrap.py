"""The bootstrap: how far a number could be off, found by drawing its requests again and again with replacement.

Does: draw counts (how often each request is in a resample) and compute percentiles and rates of all resamples at once.
Does not: know levels, metrics or verdicts (`compare.py`).

Requests are what is drawn, never single gaps between tokens: the gaps of one answer are alike, and drawing them one by one
would make intervals far too narrow. With several runs the runs are drawn first, one fewer than there are: that makes the
spread between runs come out right on average also for two or three of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int32]  # [resamples, requests]

BLOCK_REQUESTS = 8192  # whose values are counted at a time: memory does not grow with the length of a run
MAX_POINTS = 2000  # of a distribution; more values are merged into as many groups of neighbours


def draw_counts(rng: np.random.Generator, sizes: Sequence[int], resamples: int) -> Counts:
    """How often each unit is drawn, [resamples, sum(sizes)]; `sizes` has the number of units of each run."""
    num_runs = len(sizes)
    if num_runs == 1:
        times: npt.NDArray[np.int64] = np.ones((resamples, 1), np.int64)
    else:
        times = rng.multinomial(num_runs - 1, np.full(num_runs, 1 / num_runs), size=resamples)
    parts = [
        rng.multinomial(times[:, run] * size, np.full(size, 1 / size)).astype(np.int32)
        for run, size in enumerate(sizes)
        if size
    ]
    return np.concatenate(parts, axis=1) if parts else np.zeros((resamples, 0), np.int32)


def resampled_percentiles(values: Sequence[Floats], counts: Counts, percents: Sequence[float]) -> Floats:
    """Percentiles of the values of the drawn requests, [resamples, percents]; `values` has those of each request.

    nan for a resample without any value.
    """
    flat = np.concatenate(values) if len(values) else np.zeros(0)
    if not flat.size:
        return np.full((len(counts), len(percents)), np.nan)
    owners = np.repeat(np.arange(len(values)), [len(each) for each in values])
    order = np.argsort(flat, kind="stable")
    ordered, owners = flat[order], owners[order]
    if ordered.size <= MAX_POINTS:
        weights = counts[:, owners]
    else:
        group = np.arange(ordered.size) * MAX_POINTS // ordered.size
        ordered = np.array([np.median(part) for part in np.array_split(ordered, np.flatnonzero(np.diff(group)) + 1)])
        weights = _grouped_weights(owners, group, counts)
    return _weighted_percentiles(ordered, weights, percents)


def _grouped_weights(owners: npt.NDArray[np.int64], group: npt.NDArray[np.int64], counts: Counts) -> Counts:
    """How many values of each group a resample has, [resamples, groups], a block of requests at a time.

    owners, group [values]: the request of each value, and its group.
    """
    weights = np.zeros((len(counts), MAX_POINTS), np.float32)
    for first in range(0, counts.shape[1], BLOCK_REQUESTS):
        drawn = counts[:, first : first + BLOCK_REQUESTS].astype(np.float32)
        inside = (owners >= first) & (owners < first + BLOCK_REQUESTS)
        held = np.zeros((drawn.shape[1], MAX_POINTS), np.float32)  # values of each request in each group
        np.add.at(held, (owners[inside] - first, group[inside]), 1)
        weights += drawn @ held
    return np.rint(weights).astype(np.int32)


def _weighted_percentiles(ordered: Floats, weights: Counts, percents: Sequence[float]) -> Floats:
    """As if each value stood there `weights` times, interpolated as everywhere. ordered [n], weights [resamples, n]."""
    before = np.cumsum(weights, axis=1)
    totals = before[:, -1]
    found = np.empty((len(weights), len(percents)))
    for column, percent in enumerate(percents):
        place = np.maximum(totals - 1, 0) * (percent / 100)
        below = np.floor(place).astype(np.int64)
        above = np.minimum(below + 1, np.maximum(totals - 1, 0))
        low = ordered[np.minimum((before <= below[:, None]).sum(axis=1), ordered.size - 1)]
        high = ordered[np.minimum((before <= above[:, None]).sum(axis=1), ordered.size - 1)]
        found[:, column] = low + (high - low) * (place - below)
    found[totals == 0] = np.nan
    return found


def resampled_ratio(above: Floats, below: Floats, counts: Counts) -> Floats:
    """Sum of `above` by sum of `below` over the drawn units, [resamples]; nan where the latter is 0."""
    divisor = counts @ below
    found: Floats = np.divide(counts @ above, divisor, out=np.full(len(counts), np.nan), where=divisor > 0)
    return found


def interval(values: Floats, confidence: float) -> tuple[float, float] | None:
    """The middle `confidence` of the resampled values; None if there are too few of them."""
    there = values[np.isfinite(values)]
    if there.size < max(100, 0.9 * values.size):
        return None
    low, high = np.percentile(there, [50 * (1 - confidence), 50 * (1 + confidence)])
    return float(low), float(high)
