"""`Generation`: one request between its submission and its last delta, as the caller sees it.

Does: hand deltas to an iterator, a listener or `result()`; keep usage and timings. Does not: make text or talk to the
engine; its front does. Torch-free, on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from tonle.engine.best_of import BestOf
from tonle.engine.messages import AdapterInfo
from tonle.engine.request import (
    Delta,
    FinishReason,
    GenerationConfig,
    GenerationResult,
    KeptBlocks,
    Timings,
    TokenLogprob,
    Usage,
)
from tonle.errors import TonleError
from tonle.telemetry.time_spent import TimeSpent


class Generation:
    """One request under way: iterate it for deltas, await `result()`, or `listen`. Stop early with `cancel()`."""

    def __init__(self, request_id: str, prompt: list[int], config: GenerationConfig, arrived_s: float,
                 drop: Callable[[Generation], None]) -> None:  # fmt: skip
        self.request_id = request_id
        self.prompt = prompt
        self.config = config
        self.usage = Usage(prompt_tokens=len(prompt))
        self.timings = Timings(arrived_s)
        # Where its time went, of its slowest continuation; None until one has ended in the engine.
        self.spent: TimeSpent | None = None
        # Of all continuations: guesses that steps checked, and those that were right. Counted step by step, as answers that are
        # cancelled, or end at a stop string, do not end in the engine.
        self.draft_tokens = self.accepted_tokens = 0
        # Complete when the first delta arrives; nothing stands before the first token, so it has none.
        self.prompt_logprobs: list[TokenLogprob | None] | None = (
            None if config.prompt_logprobs is None else [None] * len(prompt)
        )
        self.adapter: AdapterInfo | None = None  # what it is computed with, if not the model alone
        self.kept: KeptBlocks | None = None  # where its prompt is kept for another engine, if it is
        self.handles: list[int] = []  # of the continuations the engine still works on
        self.whole = False  # the caller reads nothing before the end: the front may hold tokens back until then
        self._left = config.num_candidates  # continuations without a finish reason
        self._best_of = BestOf(config) if config.num_candidates > config.n else None
        self._deltas: deque[Delta] = deque()
        self._error: TonleError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[Delta], None] | None = None
        self._ended: asyncio.Future[None] | None = None  # for a listener
        self._drop = drop

    def cancel(self) -> None:
        """Free everything the request holds. Idempotent; safe after the end."""
        self._drop(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._left == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._pop()

    def listen(self, on_delta: Callable[[Delta], None], *, whole: bool = False) -> asyncio.Future[None]:
        """Call `on_delta` with each delta as the engine delivers it, instead of iterating: no task is woken per token.

        The future is done after the last delta, or fails with what kept it from coming. `whole`: tokens become text
        once, at the end. `on_delta` must not raise.
        """
        self._listener, self.whole = on_delta, whole
        self._ended = asyncio.get_running_loop().create_future()
        while self._deltas:
            on_delta(self._deltas.popleft())
        self.wake()
        return self._ended

    async def result(self) -> GenerationResult:
        """Wait for all continuations. Costs less than iterating: tokens become text once, at the end; so do not iterate after."""
        self.whole = True
        n = self.config.n
        texts, tokens = [""] * n, [list[int]() for _ in range(n)]
        logprobs = [list[TokenLogprob]() for _ in range(n)]
        reasons: list[FinishReason] = ["cancelled"] * n
        async for delta in self:
            texts[delta.index] += delta.text
            tokens[delta.index] += delta.tokens
            logprobs[delta.index] += delta.logprobs or ()
            reasons[delta.index] = delta.finish_reason or reasons[delta.index]
        return GenerationResult(
            request_id=self.request_id,
            prompt_ids=self.prompt,
            texts=texts,
            output_ids=tokens,
            finish_reasons=reasons,
            usage=self.usage,
            timings=self.timings,
            logprobs=None if self.config.logprobs is None else logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def failed(self, error: TonleError) -> GenerationResult:
        """The result of one that ended with this error."""
        n = self.config.n
        return GenerationResult(
            request_id=self.request_id, prompt_ids=self.prompt, texts=[""] * n, output_ids=[list[int]() for _ in range(n)],
            finish_reasons=["error"] * n, usage=Usage(len(self.prompt)),
            timings=Timings(self.timings.arrived_s, finished_s=time.monotonic()), error=error.message,
        )  # fmt: skip

    def _pop(self) -> Delta:
        """The next delta, together with what has queued up after it: a slow reader gets fewer, larger ones."""
        delta = self._deltas.popleft()
        while self._deltas and self._deltas[0].index == delta.index and delta.finish_reason is None:
            more = self._deltas.popleft()
            delta.text += more.text
            delta.tokens += more.tokens
            if delta.logprobs is not None:
                delta.logprobs += more.logprobs or ()
            delta.finish_reason, delta.stop_reason = more.finish_reason, more.stop_reason
        return delta

    # -- the front's side

    def push(self, delta: Delta, now: float) -> None:
        self.usage.completion_tokens += len(delta.tokens)
        if delta.finish_reason is not None:
            self._left -= 1
            if self._left == 0:
                self.timings.finished_s = now
        for own in [delta] if self._best_of is None else self._best_of.add(delta):
            if self._listener is None:
                self._deltas.append(own)
            else:
                self._listener(own)
        if self._listener is None or self._left == 0:
            self.wake()

    def add_guesses(self, drafted: int, accepted: int) -> None:
        """A step has checked them."""
        self.draft_tokens += drafted
        self.accepted_tokens += accepted

    def add_spent(self, spent: TimeSpent) -> None:
        """One of its continuations has ended in the engine."""
        if self.spent is None or spent.total_s > self.spent.total_s:
            self.spent = spent

    def fail(self, error: TonleError) -> None:
        self._error = error
        self.timings.finished_s = self.timings.finished_s or time.monotonic()
        self.wake()

    def close(self) -> None:
        """No more deltas will come, and iteration ends. Those not read yet are dropped, unless all are wanted."""
        if not self.whole:
            self._deltas.clear()
        self._left = 0
        self.timings.finished_s = self.timings.finished_s or time.monotonic()
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._ended is None or self._ended.done():
            return
        if self._error is not None:
            self._ended.set_exception(self._error)
        elif self._left == 0:
            self._ended.set_result(None)
