"""What the endpoints of encoders share: the tokenizer of a pool's model, and many jobs of one request.

Does: ask a worker once what its model is; keep a bounded number of a request's jobs in the pool. Does not: know bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from tonle.edge.client import Sink
from tonle.protocol.openai import FieldWarning
from tonle.protocol.parse import strict_refusal, warning_headers
from tonle.workers.encoders.text import EncoderText, text_facts
from tonle.workers.encoders.token_job import DESCRIBE
from tonle.workers.kind import Job, Result
from tonle.workers.pool import WorkerPool
from tonle.workers.worker_request import WorkerRequest

THREAD_BYTES = 32 * 1024  # a body this large is tokenized on a thread: it would hold up all other requests
_ROUNDS = 2  # batches of each instance that one request may fill; others have their turn in between
_texts: WeakKeyDictionary[WorkerPool, asyncio.Task[EncoderText]] = WeakKeyDictionary()

T = TypeVar("T")


async def text_of(pool: WorkerPool) -> EncoderText:
    """Waits for a worker the first time. Raises `TonleError`."""
    task = _texts.get(pool)
    if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
        task = _texts[pool] = asyncio.ensure_future(_read_text(pool))
    return await asyncio.shield(task)  # others wait for it, too


async def _read_text(pool: WorkerPool) -> EncoderText:
    told = await pool.run(DESCRIBE)
    return await asyncio.to_thread(EncoderText, text_facts(told.fields))


async def on_thread(request: WorkerRequest, work: Callable[[], T]) -> T:
    """There only if it takes long."""
    return await asyncio.to_thread(work) if len(request.body) > THREAD_BYTES else work()


async def run_jobs(pool: WorkerPool, jobs: Sequence[Job]) -> list[Result]:
    """Results in the order of `jobs`, which the pool gets by length: so also a part of them makes even batches. All are
    withdrawn if one fails, or the caller leaves. Raises `TonleError`."""
    results: dict[int, Result] = {}
    waiting = iter(sorted(range(len(jobs)), key=lambda place: jobs[place].size))

    async def lane() -> None:
        for place in waiting:
            results[place] = await pool.run(jobs[place])

    most = _ROUNDS * pool.config.max_batch * len(pool.config.devices)
    lanes = [asyncio.ensure_future(lane()) for _ in range(min(most, len(jobs)))]
    try:
        await asyncio.gather(*lanes)
    finally:
        for each in lanes:
            each.cancel()
    return [results[place] for place in range(len(jobs))]


def check_strict(request: WorkerRequest, warnings: list[FieldWarning]) -> None:
    """Raises `InvalidRequest`."""
    if warnings and request.is_strict:
        raise strict_refusal(warnings)


def answer_id(request: WorkerRequest, prefix: str) -> str:
    """OpenAI's prefix, then the request's id."""
    return f"{prefix}-{request.header('x-request-id').removeprefix('req-')}"


def send(sink: Sink, reply: Any, warnings: list[FieldWarning]) -> None:
    sink.head(200, {"content-type": "application/json", **warning_headers(warnings)})
    sink.data(msgspec.json.encode(reply))
