"""`RecentMean`: the mean of the latest measurements of a time, of which any one may be far too long: the machine was busy with
something else for a moment.

Does: add, with a limit to what one measurement says. Does not: know when they were made.
"""

from __future__ import annotations

NUM_RECENT = 16  # measurements that count
_MOST = 3.0  # times the mean: one that is longer counts as that
_NUM_FIRST = 3  # of these the shortest counts: there is no mean yet to limit them by


class RecentMean:
    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0  # `count`: NUM_RECENT at most

    def add(self, value: float) -> None:
        if self.count == 0:
            self.value = value
        elif self.count < _NUM_FIRST:
            self.value = min(self.value, value)
        else:
            weight = 1 / min(self.count + 1, NUM_RECENT)
            self.value += weight * (min(value, _MOST * self.value) - self.value)
        self.count = min(self.count + 1, NUM_RECENT)
