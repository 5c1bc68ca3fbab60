"""`BestOf`: of a request's candidates, those with the best mean log-probability.

Does: collect the deltas of all candidates, and choose when the last has ended. Does not: make them; the front asks the engine for
as many as `GenerationConfig.num_candidates` says, each with its log-probabilities.
"""

from __future__ import annotations

from tonle.engine.request import Delta, GenerationConfig


class BestOf:
    """Of one request."""

    def __init__(self, config: GenerationConfig) -> None:
        self._candidates = [Delta(index, "", [], []) for index in range(config.num_candidates)]
        self._num_left = len(self._candidates)
        self._num_wanted = config.n
        self._keeps_logprobs = config.logprobs is not None

    def add(self, delta: Delta) -> list[Delta]:
        """What the caller gets now: nothing, and with the last delta of the last candidate all of those that were chosen."""
        own = self._candidates[delta.index]
        own.text += delta.text
        own.tokens += delta.tokens
        assert own.logprobs is not None
        own.logprobs += delta.logprobs or ()
        if delta.finish_reason is None:
            return []
        own.finish_reason, own.stop_reason = delta.finish_reason, delta.stop_reason
        self._num_left -= 1
        return [] if self._num_left else self._chosen()

    def _chosen(self) -> list[Delta]:
        chosen = sorted(self._candidates, key=lambda each: -mean_logprob(each))[: self._num_wanted]
        for index, delta in enumerate(chosen):
            delta.index = index
            if not self._keeps_logprobs:
                delta.logprobs = None
        return chosen


def mean_logprob(delta: Delta) -> float:
    """Over its tokens, by the model itself: before temperature and penalties."""
    logprobs = delta.logprobs or []
    return sum(each.logprob for each in logprobs) / max(1, len(logprobs))
