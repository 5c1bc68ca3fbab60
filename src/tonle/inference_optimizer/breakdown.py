"""`Breakdown`: where one request's time went, in parts that add up to its latency."""

from __future__ import annotations

import time

PARTS = ("cache_lookup", "tokenization", "queue", "prefill", "generation", "decoding")

IN_WORDS = {
    "cache_lookup": "looking into the cache",
    "tokenization": "tokenizing the prompt",
    "queue": "waiting in the queue",
    "prefill": "computing the prompt",
    "generation": "generating tokens",
    "decoding": "turning tokens into text",
}


class Breakdown:
    """Moments are `time.monotonic()`. Each part begins where the one before it ended, so nothing is counted twice or lost."""

    __slots__ = ("_at_s", "_began_s", "parts")

    def __init__(self, began_s: float) -> None:
        self.parts = dict.fromkeys(PARTS, 0.0)  # seconds
        self._began_s = self._at_s = began_s

    def end(self, part: str, at_s: float | None = None) -> None:
        """What has passed since the last part's end, until `at_s` (now, if None), belongs to `part`."""
        at_s = max(self._at_s, time.monotonic() if at_s is None else at_s)
        self.parts[part] += at_s - self._at_s
        self._at_s = at_s

    @property
    def latency_s(self) -> float:
        return self._at_s - self._began_s
