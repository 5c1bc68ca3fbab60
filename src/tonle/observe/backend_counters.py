"""`BackendCounters`: the counters of one backend as differences, second by second.

Does: take readings, spread tokens over the seconds until the next one, decide whether tokens are counted by these counters or
by ended requests; never by both. Does not: read counters.
"""

from __future__ import annotations

from tonle.observe.backend_state import BackendState
from tonle.observe.sample import Sample

_PATIENCE = 3  # readings that may fail before ended requests are counted instead
_REST = 0.5  # tokens: less is not left to later seconds, where a token would cost a fortune
_AT_ONCE = ("prefix_hits", "prefix_queries", "draft_tokens", "accepted_tokens")
_SPREAD = {"generation_tokens": "output_tokens", "prompt_tokens": "prompt_tokens"}  # of the state -> of the sample


class BackendCounters:
    def __init__(self, interval_s: float) -> None:
        """`interval_s`: between two readings."""
        # A reading may come a second late: its tokens last until then, so that no second in between looks idle.
        self._spread_s = interval_s + 1.0 if interval_s > 1.0 else 1.0
        self._last: BackendState | None = None
        self._owed = dict.fromkeys(_SPREAD, 0.0)  # tokens that no second has got yet
        self._per_second = dict.fromkeys(_SPREAD, 0.0)
        self._at_once = dict.fromkeys(_AT_ONCE, 0)
        self._missed: dict[str, int] = {}
        self._num_lost = 0  # readings, in a row
        self.count_tokens = False  # False: ended requests do, those that were sent after `since`
        self.since = 0.0  # unix seconds

    def told(self, state: BackendState) -> None:
        """A reading. The first is where counting begins."""
        last, self._last, self._num_lost = self._last, state, 0
        self.count_tokens = state.generation_tokens is not None
        if last is None:
            return
        for name in _SPREAD:
            self._owed[name] += _grown(getattr(last, name), getattr(state, name))
            self._per_second[name] = self._owed[name] / self._spread_s
        for name in _AT_ONCE:
            self._at_once[name] += _grown(getattr(last, name), getattr(state, name))
        before = last.prefix_missed or {}
        for reason, count in (state.prefix_missed or {}).items():
            if added := _grown(before.get(reason, 0), count):
                self._missed[reason] = self._missed.get(reason, 0) + added

    def lost(self, now: float) -> None:
        """A reading failed. What is counted meanwhile comes with the next one, unless too many fail."""
        self._num_lost += 1
        if self._num_lost == _PATIENCE and self._last is not None:
            self._last = None
            self.count_tokens, self.since = False, now

    def take(self, sample: Sample) -> dict[str, int]:
        """Add a second's share to `sample`. Returns prompt tokens that were not found in the prefix cache, by reason."""
        for name, target in _SPREAD.items():
            if owed := self._owed[name]:
                share = self._per_second[name]
                if owed - share < _REST:
                    share = owed
                self._owed[name] = owed - share
                setattr(sample, target, getattr(sample, target) + share)
        for name, count in self._at_once.items():
            if count:
                setattr(sample, name, getattr(sample, name) + count)
                self._at_once[name] = 0
        missed, self._missed = self._missed, {}
        return missed


def _grown(before: int | None, now: int | None) -> int:
    if now is None or before is None:
        return 0
    return now - before if now >= before else now  # it was restarted
