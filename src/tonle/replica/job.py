"""`Job`: the work one HTTP request causes in the engine, from submission to release.

Does: submit every prompt, merge their deltas, free what is left however it ends, observe the metrics of requests.
Does not: format anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import TracebackType
from typing import Self

from tonle.engine.request import Delta, Usage
from tonle.errors import CapacityError, InternalError
from tonle.protocol.openai import PromptTokensDetails, WireUsage
from tonle.replica.served import Running, Served
from tonle.replica.translate import EngineRequest
from tonle.telemetry.metrics import Metrics


class _Pace:
    """When the deltas of one choice came."""

    __slots__ = ("first_s", "last_s", "num_tokens", "reason")

    def __init__(self) -> None:
        self.first_s = 0.0
        self.last_s = 0.0
        self.num_tokens = 0
        self.reason = "abort"  # until it ends otherwise


class Job:
    """Use as a context manager: leaving it cancels whatever is not finished. Choice = prompt's place x n + index."""

    def __init__(
        self, front: Served, order: EngineRequest, *, request_id: str, metrics: Metrics, salt: bytes = b""
    ) -> None:
        self.order = order
        self.num_choices = len(order.parts) * order.n
        self._front = front
        self._request_id = request_id
        self._salt = salt
        self._metrics = metrics
        self._running: list[Running] = []
        self._paces = [_Pace() for _ in range(self.num_choices)]

    def __enter__(self) -> Self:
        try:
            for place, part in enumerate(self.order.parts):
                request_id = self._request_id if len(self.order.parts) == 1 else f"{self._request_id}-{place}"
                self._running.append(
                    self._front.submit(
                        part.prompt,
                        part.config,
                        priority=self.order.priority,
                        salt=self._salt,
                        request_id=request_id,
                    )
                )
        except BaseException:
            self._cancel()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = error is not None and isinstance(error, Exception)
        self._cancel()
        for pace in self._paces:
            self._metrics.count_finished("error" if failed and pace.reason == "abort" else pace.reason)
        for place, running in enumerate(self._running):
            paces = self._paces[place * self.order.n : (place + 1) * self.order.n]
            self._observe(running, finished=all(pace.reason != "abort" for pace in paces))

    def _cancel(self) -> None:
        for running in self._running:
            running.cancel()

    def running(self, choice: int) -> Running:
        return self._running[choice // self.order.n]

    @property
    def usage(self) -> Usage:
        """All prompts together; a prompt counts once, whatever n."""
        usages = [running.usage for running in self._running]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            completion_tokens=0 if self.order.prompt_only else sum(usage.completion_tokens for usage in usages),
        )

    @property
    def wire_usage(self) -> WireUsage:
        usage = self.usage
        total = usage.prompt_tokens + usage.completion_tokens
        details = PromptTokensDetails(usage.cached_tokens)
        return WireUsage(usage.prompt_tokens, usage.completion_tokens, total, details)

    def timing_headers(self) -> list[tuple[str, str]]:
        """Where the time of a finished answer went, seconds; of several prompts, the slowest's."""
        found = [running.timings for running in self._running]
        parts = {
            "x-queue-time": [timings.queue_s for timings in found],
            "x-prefill-time": [_gap(timings.scheduled_s, timings.first_token_s) for timings in found],
            "x-decode-time": [_gap(timings.first_token_s, timings.finished_s) for timings in found],
        }
        known = {name: [value for value in values if value is not None] for name, values in parts.items()}
        return [(name, f"{max(values):.6f}") for name, values in known.items() if values]

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(choice, delta) in the order they come; choices interleave. Close it (`aclosing`)."""
        if len(self._running) == 1:
            async for delta in self._running[0]:
                self._note(delta.index, delta)
                yield delta.index, delta
            return
        async for choice, delta in _merge(self._running, self.order.n):
            self._note(choice, delta)
            yield choice, delta

    def _note(self, choice: int, delta: Delta) -> None:
        pace = self._paces[choice]
        now = time.monotonic()
        if delta.tokens:
            if pace.num_tokens == 0:
                pace.first_s = now
            else:
                self._metrics.itl.observe(now - pace.last_s)
            pace.last_s = now
            pace.num_tokens += len(delta.tokens)
        if delta.finish_reason is not None:
            if delta.finish_reason == "error":
                raise InternalError("the engine could not finish this request")
            if delta.finish_reason == "cancelled":
                raise CapacityError("the engine dropped this request; try again")
            pace.reason = delta.finish_reason
            if pace.num_tokens > 1:
                self._metrics.tpot.observe((pace.last_s - pace.first_s) / (pace.num_tokens - 1))

    def _observe(self, running: Running, *, finished: bool) -> None:
        metrics, timings, usage = self._metrics, running.timings, running.usage
        if timings.queue_s is not None:
            metrics.queue.observe(timings.queue_s)
        if timings.ttft_s is not None:
            metrics.ttft.observe(timings.ttft_s)
        if timings.scheduled_s is None or timings.first_token_s is None or timings.finished_s is None or not finished:
            return  # durations of answers that were cut short would flatter us
        metrics.e2e.observe(timings.finished_s - timings.arrived_s)
        metrics.prefill.observe(timings.first_token_s - timings.scheduled_s)
        metrics.decode.observe(timings.finished_s - timings.first_token_s)
        metrics.inference.observe(timings.finished_s - timings.scheduled_s)
        metrics.prompt_tokens.observe(usage.prompt_tokens)
        metrics.generation_tokens.observe(usage.completion_tokens)


def _gap(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


async def _merge(sources: list[Running], n: int) -> AsyncGenerator[tuple[int, Delta], None]:
    # A source that ends puts None, one that fails puts its error.
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def pump(place: int, source: Running) -> None:
        try:
            async for delta in source:
                queue.put_nowait((place * n + delta.index, delta))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(place, source)) for place, source in enumerate(sources)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
