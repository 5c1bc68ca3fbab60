"""`TextStream`: the tokens of one continuation in, text that may be shown out.

Does: hold back incomplete characters, the last cluster where it may still grow (`holding.py`) and the start of a stop
string, each no longer than needed; end at a stop string; end cleanly where the tokens end. Does not: know of requests,
deltas or event loops. One stream per continuation; not shared between threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from tonle.engine.text.detokenize import Detokenizer
from tonle.engine.text.graphemes import floor, is_boundary, trim
from tonle.engine.text.holding import Holding
from tonle.engine.text.stops import StopMatch, StopStrings


class TextStream:
    """What `push` and `finish` return, joined, is the same however the tokens were grouped.

    The end of a text is not always where a letter ends (`max_tokens`). Dropped there: an incomplete UTF-8 sequence,
    and a joiner that waits for a letter (`graphemes.trim`). A stop string that matches inside a letter leaves the
    same clean end.
    """

    __slots__ = ("_detokenizer", "_holding", "_include_stop_text", "_pending", "_stops", "stopped")

    def __init__(
        self,
        detokenizer: Detokenizer,
        holding: Holding,
        *,
        stop: Sequence[str] = (),
        include_stop_text: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._holding = holding
        self._stops = StopStrings(stop) if any(stop) else None
        self._include_stop_text = include_stop_text
        self._pending = ""  # decoded, not given out; starts at a boundary
        self.stopped: str | None = None  # the stop string that matched

    def push(self, tokens: Sequence[int]) -> str:
        """The text that may be shown now. Empty once a stop string has matched."""
        text = self._detokenizer.push(tokens)
        if self._stops is None and not self._pending and text.isascii() and text[-1:] in self._holding.calm_ascii:
            return text  # English, nearly all of the time
        if not text or self.stopped is not None:
            return ""
        self._pending += text
        if self._stops is not None and (match := self._stops.find(self._pending)):
            return self._stop(match)
        return self._take(self._num_safe(len(text)))

    def finish(self) -> str:
        """The rest: no more tokens will come."""
        if self.stopped is not None:
            return ""
        self._pending += self._detokenizer.finish()
        if self._stops is not None and (match := self._stops.find(self._pending)):
            return self._stop(match)
        return trim(self._take(len(self._pending)))

    @property
    def num_waiting(self) -> int:
        """Characters that tokens have begun or completed and that are not given out."""
        return len(self._pending) + self._detokenizer.is_open

    def _num_safe(self, num_new: int) -> int:
        """Characters of `_pending` that nothing to come will change."""
        safe = self._holding.safe_length(self._pending, num_new)
        if self._stops is None:
            return safe
        before_stop = len(self._pending) - self._stops.open_length(self._pending)
        return safe if safe <= before_stop else floor(self._pending, before_stop)

    def _stop(self, match: StopMatch) -> str:
        self.stopped = match.stop
        seen = self._take(match.end)
        self._pending = ""
        if self._include_stop_text:
            return seen
        text = seen[: match.start]
        return text if is_boundary(seen, match.start) else trim(text)

    def _take(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        return text
