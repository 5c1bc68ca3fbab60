"""Pools for tests: short pauses, small batches, and waiting for a state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from tonle.child.supervisor import Backoff
from tonle.workers.kind import Result
from tonle.workers.pool import WorkerPool
from tonle.workers.pool_config import PoolConfig

SCRIPTED = "tests.workers.kinds:Scripted"
ONE_BY_ONE = "tests.workers.kinds:OneByOne"
PATIENCE_S = 200.0


def short_pauses() -> Backoff:
    return Backoff(0.01, max_s=0.02)


def new_pool(kind: str = SCRIPTED, **settings: Any) -> WorkerPool:
    settings = {"timeout_s": 60.0, "max_wait_ms": 20.0, **settings}
    return WorkerPool(PoolConfig(kind=kind, name="test", **settings), backoff=short_pauses)


@contextlib.asynccontextmanager
async def running(kind: str = SCRIPTED, **settings: Any) -> AsyncIterator[WorkerPool]:
    """Started and ready."""
    async with new_pool(kind, **settings) as pool:
        yield pool


def run(steps: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(steps, PATIENCE_S))


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def metric(pool: WorkerPool, name: str, **labels: str) -> float:
    found = [
        sample.value
        for family in pool.metrics.collect()
        for sample in family.samples
        if sample.name == f"tonle_worker_{name}" and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


async def numbers_of(pieces: AsyncIterator[Result], read: list[int]) -> None:
    """Of the pieces as they come, whatever ends them."""
    async for piece in pieces:
        read.append(piece.fields["number"])  # noqa: PERF401
