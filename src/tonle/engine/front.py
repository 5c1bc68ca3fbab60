"""The front of an engine: prompts in, deltas out. Torch-free; lives in the caller's process and event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

from tonle.engine.messages import LoopStats, ModelCard
from tonle.engine.request import (
    Delta,
    GenerationConfig,
    GenerationResult,
    RequestPriority,
    Timings,
    TokenLogprob,
    Usage,
)


class Generation:
    """One request under way: iterate it for deltas, or await `result()`. Leaving it unfinished must be followed by `cancel()`."""

    request_id: str
    prompt: list[int]
    config: GenerationConfig
    usage: Usage  # grows with every delta
    timings: Timings
    prompt_logprobs: list[TokenLogprob | None] | None  # complete when the first delta arrives

    def cancel(self) -> None:
        """Free everything the request holds. Idempotent; safe after the end."""
        raise NotImplementedError

    def __aiter__(self) -> AsyncIterator[Delta]:
        raise NotImplementedError

    async def result(self) -> GenerationResult:
        raise NotImplementedError


class Front:
    card: ModelCard | None  # None until the engine is ready
    stats: LoopStats

    @property
    def ready(self) -> bool:
        raise NotImplementedError

    def submit(
        self,
        prompt: list[int],
        config: GenerationConfig,
        *,
        priority: RequestPriority = RequestPriority.NORMAL,
        salt: bytes = b"",
        request_id: str | None = None,
    ) -> Generation:
        """Check the request and hand it to the engine. Raises `CallerError` or `CapacityError` at once."""
        raise NotImplementedError
