"""`StaticBatches`: batches that are filled before they run, and end before the next one begins (`continuous` is off).

Does: say when the next batch may be admitted, and how long to wait for it. Does not: admit. With continuous batching it is always
open.
"""

from __future__ import annotations

from tonle.engine.schedule.limits import SchedulerLimits
from tonle.engine.schedule.queue import WaitingQueue


class StaticBatches:
    def __init__(self, limits: SchedulerLimits, waiting: WaitingQueue) -> None:
        self.num_left = 0  # members of the open batch not admitted yet
        self._limits = limits
        self._waiting = waiting

    def is_open(self, now: float, some_run: bool) -> bool:
        """Whether one more may be admitted."""
        if self._limits.continuous or self.num_left > 0:
            return True
        oldest = self._waiting.oldest_arrival_s()
        due = oldest is not None and now - oldest >= self._limits.batch_timeout_s
        if some_run or not (self._is_full or due):
            return False
        self.num_left = min(len(self._waiting), self._limits.max_num_seqs)
        return True

    def wake_s(self, now: float) -> float | None:
        """How long until the next one is due; None: no sequence waits."""
        oldest = self._waiting.oldest_arrival_s()
        if oldest is None:
            return None
        if self._limits.continuous or self._is_full:
            return 0.0
        return max(0.0, oldest + self._limits.batch_timeout_s - now)

    @property
    def _is_full(self) -> bool:
        return len(self._waiting) >= self._limits.max_num_seqs
