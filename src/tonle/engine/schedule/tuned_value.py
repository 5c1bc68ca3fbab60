"""`TunedValue`: a number that follows what would suit, calmly: cut at once, raised slowly, still within a dead band."""

from __future__ import annotations

DEAD_BAND = 0.1  # of the value: differences that change nothing
_APART_S = 0.2  # between a change and the next cut: steps that were planned before it must pass
_HOLD_S = 1.0  # a higher value must have suited for so long before the value is raised
_MAX_HOLD_S = 60.0
_HOLD_TIMES = 8  # and in so many steps
_CAREFUL_GROWTH = 1.25


class TunedValue:
    """A whole number from `low` to `high`. A raise that had to be taken back doubles the wait for the next one."""

    def __init__(self, low: int, high: int, start: int) -> None:
        self.low, self.high = low, high
        self.value = min(high, max(low, start))
        self._growth = 2.0  # of a raise; less once the value had to be cut
        self._hold_s = _HOLD_S
        self._changed_s = float("-inf")
        self._raised = False  # the last change was a raise
        self._since_s: float | None = None  # when the present wait began
        self._least = float("inf")  # that would have suited since
        self._times = 0

    def follow(self, suits: float, now: float) -> bool:
        """`suits` is the value that would be right now. True if the value changed."""
        suits = min(self.high, max(self.low, suits))
        if suits < self.value - max(DEAD_BAND * self.value, 0.5):
            return self._cut(int(suits), now)
        if self._since_s is None:
            self._since_s = now
        self._least = min(self._least, suits)
        self._times += 1
        if now - self._since_s < self._hold_s or self._times < _HOLD_TIMES:
            return False
        least = self._least
        self._wait_again(now)
        if least < min(self.high, self.value + max(DEAD_BAND * self.value, 1)) or self.value == self.high:
            return False
        if self._raised:
            self._hold_s = max(_HOLD_S, self._hold_s / 2)  # the last one was right
        self.value = int(min(least, max(self.value + 1, self.value * self._growth)))
        self._changed_s, self._raised = now, True
        return True

    def _cut(self, value: int, now: float) -> bool:
        if now - self._changed_s < _APART_S:
            return False
        if self._raised and now - self._changed_s < 2 * self._hold_s:
            self._hold_s = min(_MAX_HOLD_S, 2 * self._hold_s)
        self._growth = _CAREFUL_GROWTH
        self.value = max(self.low, value)
        self._changed_s, self._raised = now, False
        self._wait_again(now)
        return True

    def _wait_again(self, now: float) -> None:
        self._since_s, self._least, self._times = now, float("inf"), 0
