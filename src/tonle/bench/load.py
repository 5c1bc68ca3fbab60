"""`Load`: how hard one level pushes.

Does: name a load, say how many requests it has by default. Does not: draw the moments of arrivals (`arrivals.py`) or send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

LoadKind = Literal["concurrency", "rate", "ramp", "replay"]
Arrivals = Literal["poisson", "constant", "gamma"]


@dataclass(frozen=True, slots=True)
class Load:
    """So many users who each wait for their answer, so many arrivals per second, a rate that rises during the level, or the
    arrival times of recorded requests."""

    kind: LoadKind
    value: (
        float  # users, or requests per second; of a ramp, the rate it begins with; of a replay, how many times as fast
    )
    to: float | None = None  # of a ramp: the rate it ends with
    arrivals: Arrivals = "poisson"  # open loop: how gaps between requests are drawn
    burstiness: float = 1.0  # of gamma arrivals: its shape; 1 is Poisson, less comes in bursts, more is more even

    @property
    def label(self) -> str:
        if self.kind == "concurrency":
            return f"concurrency {self.value:g}"
        if self.kind == "replay":
            return f"replay ×{self.value:g}"
        if self.kind == "ramp":
            return f"ramp {self.value:g}-{self.to:g}/s{self._gaps}"
        return f"rate {self.value:g}/s{self._gaps}"

    @property
    def _gaps(self) -> str:
        if self.arrivals == "gamma":
            return f", gamma {self.burstiness:g}"
        return "" if self.arrivals == "poisson" else f", {self.arrivals}"

    @property
    def users(self) -> int | None:
        """Closed loop: how many; None for an open loop."""
        return int(self.value) if self.kind == "concurrency" else None

    @property
    def rate(self) -> float | None:
        """Open loop: requests per second, of a ramp on average; None for a closed loop and a replay."""
        if self.kind in ("concurrency", "replay"):
            return None
        return self.value if self.to is None else (self.value + self.to) / 2

    @property
    def default_requests(self) -> int | None:
        """Four rounds for every user, or twenty seconds of arrivals: the least that percentiles make sense of.

        None: the time decides, or what was recorded.
        """
        if self.kind == "concurrency":
            return max(8, 4 * int(self.value))
        return max(16, math.ceil(20 * self.value)) if self.kind == "rate" else None
