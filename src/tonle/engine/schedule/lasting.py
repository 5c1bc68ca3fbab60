"""`Lasting`: whether something has been so for a while, so that it is said once and not with every step."""

from __future__ import annotations

_AFTER_S = 5.0  # without interruption, before it counts as begun or ended


class Lasting:
    def __init__(self) -> None:
        self.lasts = False
        self._other_since_s: float | None = None  # when it began to look otherwise than `lasts` says

    def see(self, so: bool, now: float) -> bool | None:
        """True when it has begun, False when it has ended, None as long as nothing turns."""
        if so == self.lasts:
            self._other_since_s = None
            return None
        if self._other_since_s is None:
            self._other_since_s = now
        if now - self._other_since_s < _AFTER_S:
            return None
        self.lasts, self._other_since_s = so, None
        return so
