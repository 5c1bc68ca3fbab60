"""Putting an engine's process to sleep and waking it, by callers that do not wait for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tonle.engine.sleep import SleepingProcess


class SlowEngine:
    """Takes its time to stop and to start."""

    def __init__(self) -> None:
        self.num_running = 1
        self.may_go_on = asyncio.Event()

    async def start(self, front: Any) -> None:
        self.num_running += 1

    async def wait_ready(self) -> None:
        await self.may_go_on.wait()

    async def stop(self) -> None:
        await self.may_go_on.wait()
        self.num_running -= 1


async def hung_up(call: Any) -> None:
    """As a server does with the handler of a caller that has left."""
    task = asyncio.create_task(call)
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


def process_of(engine: SlowEngine) -> SleepingProcess:
    front: Any = SimpleNamespace(
        cancel_all=lambda: None, lose=lambda error: None, ready_card=lambda: SimpleNamespace(device="cpu")
    )
    return SleepingProcess(engine, front)  # type: ignore[arg-type]


def test_an_engine_that_is_being_stopped_sleeps() -> None:
    """It serves nothing any more, and whoever asks why learns that it sleeps, and not that it died."""

    async def main() -> None:
        engine = SlowEngine()
        process = process_of(engine)
        await hung_up(process.sleep(2))
        assert process.is_sleeping and engine.num_running == 1
        engine.may_go_on.set()
        await process.wake_up()
        assert not process.is_sleeping and engine.num_running == 1

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_caller_that_hangs_up_leaves_it_neither_half_asleep_nor_started_twice() -> None:
    async def main() -> None:
        engine = SlowEngine()
        process = process_of(engine)
        await hung_up(process.sleep(2))
        engine.may_go_on.set()
        await process.sleep(2)  # after the one before
        assert process.is_sleeping and engine.num_running == 0
        engine.may_go_on.clear()
        await hung_up(process.wake_up())
        engine.may_go_on.set()
        await process.wake_up()
        assert not process.is_sleeping and engine.num_running == 1

    asyncio.run(asyncio.wait_for(main(), 120))
