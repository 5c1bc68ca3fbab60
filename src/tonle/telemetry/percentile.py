"""`percentile`: one rule for every latency that is reported, by servers, the library and the benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of `ordered` (ascending) lies: between the two nearest, in proportion. 0 if empty."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    if below == place:  # on a value: its neighbour does not count, which may be infinite (a request that failed)
        return ordered[below]
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
