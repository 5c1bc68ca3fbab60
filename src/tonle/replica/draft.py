"""`Draft`: one choice of an answer that is sent whole, while it grows.

Does: collect deltas. Does not: format.
"""

from __future__ import annotations

from tonle.engine.request import Delta, TokenLogprob
from tonle.protocol.openai import FinishReason


class Draft:
    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        if delta.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += delta.logprobs
        self._last = delta

    def delta(self) -> Delta:
        """All deltas as if they had come as one."""
        assert self._last is not None, "every choice ends with a delta"
        return Delta(
            index=self._last.index,
            text="".join(self._texts),
            tokens=self._tokens,
            logprobs=self._logprobs,
            finish_reason=self._last.finish_reason,
            stop_reason=self._last.stop_reason,
        )


def wire_reason(delta: Delta) -> FinishReason:
    """Only for a choice's last delta. `Job` turns the engine's other reasons into errors."""
    assert delta.finish_reason in ("stop", "length")
    return delta.finish_reason
