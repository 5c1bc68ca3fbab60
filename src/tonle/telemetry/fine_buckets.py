"""Buckets that grow by 5 %: one division of durations, for percentiles that can be merged.

Does: say which bucket a value is in, and which value stands for a bucket. Does not: count (`observe/sketch.py`, `TokenGaps`).

Bucket b holds the values above GROWTH**(b-1) and up to GROWTH**b, in seconds; its middle is within 2.5 % of each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log

GROWTH = 1.05
_PER_LOG = 1 / log(GROWTH)
_MIDDLE = 2 / (1 + GROWTH)  # of an upper bound: as far, in proportion, from the lower bound as from the upper

LOWEST_S = 1e-6  # what is shorter counts as that
HIGHEST_S = 1e6
FIRST = ceil(log(LOWEST_S) * _PER_LOG)
LAST = ceil(log(HIGHEST_S) * _PER_LOG)


def bucket_of(value: float) -> int:
    if not value > LOWEST_S:  # not a number, too
        return FIRST
    return ceil(log(value) * _PER_LOG) if value < HIGHEST_S else LAST


def buckets_of(values: Sequence[float]) -> list[int]:
    """`bucket_of` of each, without a call for each."""
    return [ceil(log(v) * _PER_LOG) if LOWEST_S < v < HIGHEST_S else bucket_of(v) for v in values]


def upper_bound(bucket: int) -> float:
    return GROWTH**bucket


def middle(bucket: int) -> float:
    """0 for the first: an answer from memory, or a clock that stood still."""
    return 0.0 if bucket <= FIRST else GROWTH**bucket * _MIDDLE
