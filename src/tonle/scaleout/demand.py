"""How many replicas a load needs, and when the number may change. Pure functions of figures and moments.

Does: decide as a horizontal pod autoscaler does: a recommendation per look, and no change before it has lasted. Does not: read
metrics, or start anything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_SHRINK_USE = 0.8  # of `max_use`: fewer replicas must stay below this, or they would soon be too few again


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What a replica told last."""

    running: int = 0  # sequences
    waiting: int = 0
    kv_use: float = 0.0  # 0..1

    @property
    def is_idle(self) -> bool:
        return self.running + self.waiting == 0

    def use(self, max_num_seqs: int) -> float:
        """0..1, and above that if it runs more than was said."""
        return max(self.kv_use, self.running / max_num_seqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLimits:
    min_replicas: int
    max_replicas: int
    waiting_requests: int  # per replica
    max_use: float  # 0..1
    max_num_seqs: int  # of each replica
    up_delay_s: float
    down_delay_s: float


def recommend(loads: Sequence[ReplicaLoad | None], current: int, limits: ScaleLimits) -> int:
    """Replicas for this load. `loads`: of those that are ready; None: it does not tell, which is not the same as idle."""
    if not loads:
        return _within(limits, current)
    known = [load for load in loads if load is not None]
    silent = len(loads) - len(known)
    use = sum(load.use(limits.max_num_seqs) for load in known)
    waiting = sum(load.waiting for load in known)
    wanted = max(silent + _ceil(use / limits.max_use), _ceil(waiting / limits.waiting_requests))
    if wanted < current:
        wanted = min(current, max(wanted, silent + _ceil(use / (limits.max_use * _SHRINK_USE))))
    return _within(limits, wanted)


def _within(limits: ScaleLimits, count: int) -> int:
    return min(limits.max_replicas, max(limits.min_replicas, count))


def _ceil(number: float) -> int:
    return math.ceil(number - 1e-9)  # 3 * 0.1 / 0.1 is 3


class Scaler:
    """The number of replicas that should be, from one look to the next."""

    def __init__(self, limits: ScaleLimits, replicas: int) -> None:
        self.limits = limits
        self.replicas = _within(limits, replicas)
        self._lately: deque[tuple[float, int]] = deque()  # when, recommendation; as far back as the longer delay
        self._began_s: float | None = None

    def look(self, now_s: float, loads: Sequence[ReplicaLoad | None], *, is_settled: bool) -> int:
        """`is_settled`: no replica that was asked for is still starting; until then no more are asked for."""
        limits = self.limits
        self._began_s = now_s if self._began_s is None else self._began_s
        self._lately.append((now_s, recommend(loads, self.replicas, limits)))
        while self._lately[0][0] < now_s - max(limits.up_delay_s, limits.down_delay_s):
            self._lately.popleft()
        least = min(count for at_s, count in self._lately if at_s >= now_s - limits.up_delay_s)
        most = max(count for at_s, count in self._lately if at_s >= now_s - limits.down_delay_s)
        if least > self.replicas and is_settled and now_s - self._began_s >= limits.up_delay_s:
            self.replicas = least
        elif most < self.replicas and now_s - self._began_s >= limits.down_delay_s:
            self.replicas = most
        return self.replicas
