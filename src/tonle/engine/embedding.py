"""Embeddings, as a front asks its engine for them. Torch-free, on the front's event loop.

Does: check prompts, hand them to the engine, wait for all of a caller's, and take them back if it leaves. Does not: compute.

However many prompts a caller has, a bounded number of them is with the engine at a time; the next ones follow as those are
done. So a caller with thousands does not stand before all others in the engine's queue.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tonle.engine.adapters.front_adapters import FrontAdapters
from tonle.engine.front_errors import check_priority, check_prompt, ended_early, refusal
from tonle.engine.messages import AdapterInfo, Cancel, ModelCard, Step, Submit, ToEngine
from tonle.engine.request import POOLINGS, Request, RequestPriority, ResolvedConfig, Timings, Usage
from tonle.errors import ContextOverflow, EngineDied, InvalidRequest, TonleError

Vector = npt.NDArray[np.float32]

_CONFIG = ResolvedConfig(max_length=0)  # no token is wanted
_ROUNDS = 2  # batches of the engine that one caller's prompts may fill: one is computed while the next waits


@dataclass(slots=True)
class Embedding:
    """Of one prompt."""

    usage: Usage
    timings: Timings
    vector: Vector = field(default_factory=lambda: np.empty(0, np.float32))  # (hidden size,), not scaled
    adapter: AdapterInfo | None = None  # what it is computed with, if not the model alone


def normalized(vectors: Vector) -> Vector:
    """Vectors (N, D), each scaled to length 1; one of zeros stays as it is."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32)


class _Batch:
    """The prompts of one caller."""

    def __init__(self, requests: list[Request], adapter: AdapterInfo | None, most: int) -> None:
        now = time.monotonic()
        self.found = [Embedding(Usage(len(request.prompt)), Timings(now), adapter=adapter) for request in requests]
        self.adapter = adapter
        self.most = most  # with the engine at a time
        self.waiting = deque(enumerate(requests))  # by place, not sent yet
        self.handles: dict[int, int] = {}  # sent, not done: place by handle
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: TonleError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class FrontEmbeddings:
    """Owns every embedding between its submission and its vector."""

    def __init__(
        self, send: Callable[[ToEngine], None], new_handle: Callable[[], int], adapters: FrontAdapters
    ) -> None:
        self.live: dict[int, _Batch] = {}  # by handle
        self._send = send
        self._new_handle = new_handle
        self._adapters = adapters

    async def embed(
        self, card: ModelCard, prompts: list[list[int]], *, pooling: str, priority: RequestPriority, salt: bytes,
        adapter: str | None,
    ) -> list[Embedding]:  # fmt: skip
        """As `Front.embed`."""
        check_pooling(pooling)
        check_priority(priority)
        for place, prompt in enumerate(prompts):
            name = "prompt" if len(prompts) == 1 else f"prompts[{place}]"
            check_prompt(prompt, card.vocab_size, name)
            check_fits(prompt, card.context_length, name)
        info = None if adapter is None else self._adapters.find(adapter)
        shared: dict[str, Any] = {"config": _CONFIG, "priority": priority, "pooling": pooling}
        shared |= {"salt": salt if info is None else info.digest.encode() + salt, "adapter": info.id if info else 0}
        requests = [Request(handle=0, prompt=prompt, **shared) for prompt in prompts]
        batch = _Batch(requests, info, _ROUNDS * card.max_num_seqs)
        if not requests:
            return []
        try:
            self._fill(batch)
            await batch.done
        finally:
            self._withdraw(batch)
        return batch.found

    def _fill(self, batch: _Batch) -> None:
        """Send as many as there is room for. One that is sent later stands in the queue behind those that came meanwhile."""
        sent, now = [], time.monotonic()
        while batch.waiting and len(batch.handles) < batch.most:
            place, request = batch.waiting.popleft()
            request.handle, request.arrived_s = self._new_handle(), now
            batch.handles[request.handle] = place
            self.live[request.handle] = batch
            sent.append(request)
        if sent:
            self._send(Submit(sent))

    def _withdraw(self, batch: _Batch) -> None:
        """Let go of whatever the engine still works on for it."""
        batch.waiting.clear()
        handles = [handle for handle in batch.handles if self.live.pop(handle, None) is not None]
        batch.handles.clear()
        if handles:
            self._send(Cancel(handles))

    def deliver(self, step: Step) -> None:
        """What a step has for them."""
        now = time.monotonic()
        for handle, (when, cached) in step.started.items():
            if (batch := self.live.get(handle)) is not None:
                found = batch.found[batch.handles[handle]]
                found.timings.scheduled_s, found.usage.cached_tokens = when, cached
        moved: dict[int, _Batch] = {}
        for handle, data in step.embeddings.items():
            if (batch := self.live.pop(handle, None)) is not None:
                found = batch.found[batch.handles.pop(handle)]
                found.vector = np.frombuffer(data, dtype="<f4")
                found.timings.first_token_s = found.timings.finished_s = now
                moved[id(batch)] = batch
        for handle, (reason, _) in step.finished.items():
            if (batch := self.live.get(handle)) is not None:
                batch.fail(ended_early(reason, batch.adapter))
        for handle, why in step.refused.items():
            if (batch := self.live.get(handle)) is not None:
                batch.fail(refusal(why, batch.adapter, self._adapters))
        for batch in moved.values():
            self._move(batch)

    def _move(self, batch: _Batch) -> None:
        if batch.done.done():
            return
        try:
            self._fill(batch)
        except TonleError as error:  # the engine does not read
            batch.fail(error)
        if not batch.handles and not batch.done.done():
            batch.done.set_result(None)

    def lose(self, why: str) -> None:
        """The engine is gone, and with it all they wait for."""
        lost = {id(batch): batch for batch in self.live.values()}
        self.live.clear()
        for batch in lost.values():
            batch.handles.clear()
            batch.fail(EngineDied(why))


def check_pooling(pooling: str) -> None:
    if pooling not in POOLINGS:
        raise InvalidRequest(f"pooling must be {' or '.join(POOLINGS)}, not {pooling!r:.100}", param="pooling")


def check_fits(prompt: list[int], context_length: int, name: str) -> None:
    """`name`: what the caller calls it."""
    if len(prompt) > context_length:
        raise ContextOverflow(
            f"{name} has {len(prompt)} tokens, but the model's context is {context_length} tokens; shorten it, or cut it "
            "into parts and embed each", param=name,
        )  # fmt: skip
