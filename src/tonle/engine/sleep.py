"""An engine that sleeps: it computes nothing, and its memory is the system's again.

  level 1  the keys and values are given back, the weights stay where they are; on a CPU alone, where that is host memory
  level 2  all of it is given back: the engine's process ends, and is started again to wake

Does: end requests that are under way, have those that come refused (503, `EngineRestarting`), bring the engine back. Does
not: wake by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tonle.engine.front import Front
from tonle.engine.messages import Adapters, ReleaseMemory, ToEngine
from tonle.engine.process import EngineProcess
from tonle.errors import EngineDied, InvalidRequest

ASLEEP = "it sleeps, and must be woken first (POST /wake_up; wake_up() in a program)"


def check_level(level: int, device: str) -> None:
    """Raises `InvalidRequest`."""
    if level not in (1, 2):
        raise InvalidRequest(
            f"level must be 1 (give keys and values back) or 2 (weights, too), not {level}", param="level"
        )
    if level == 1 and device.startswith("cuda"):
        raise InvalidRequest(
            "level 1 keeps weights in host memory, and those of this engine are on a GPU; use level 2, which loads them again",
            param="level",
        )


class Nap:
    """Level 1. On the front's thread."""

    def __init__(self, front: Front, send: Callable[[ToEngine], None]) -> None:
        """It begins."""
        assert front.card is not None
        self._front = front
        self._card = front.card
        self._adapters = Adapters([*front.adapters.values()])
        self._asleep = EngineDied(ASLEEP)
        front.cancel_all()
        front.lose(self._asleep)
        send(ReleaseMemory())

    def end(self) -> None:
        if (
            self._front.failure is self._asleep
        ):  # else the engine died meanwhile: the next one has told of itself, or will
            self._front.deliver(self._adapters)
            self._front.deliver(self._card)


class SleepingProcess:
    """Of a server: its engine is a process. One change at a time, which goes on to its end if whoever asked for it is gone."""

    def __init__(self, engine: EngineProcess, front: Front) -> None:
        self._engine = engine
        self._front = front
        self._level = 0  # it is asleep on; 0: it is awake
        self._nap: Nap | None = None
        self._turn = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()  # under way

    @property
    def is_sleeping(self) -> bool:
        return self._level > 0

    async def sleep(self, level: int) -> None:
        """Asleep already: nothing happens. Raises `InvalidRequest`, or `CapacityError` if the engine is not ready."""
        await self._change(self._sleep(level))

    async def wake_up(self) -> None:
        """Returns when the engine is ready; raises what keeps it from starting, and can be called again then."""
        await self._change(self._wake_up())

    async def _change(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _sleep(self, level: int) -> None:
        async with self._turn:
            if self._level:
                return
            check_level(level, self._front.ready_card().device)
            if level == 1:
                self._nap = Nap(self._front, self._engine.send)
            self._level = level  # from here on no request is served
            if level == 2:
                self._front.cancel_all()
                self._front.lose(EngineDied(ASLEEP))
                await self._engine.stop()

    async def _wake_up(self) -> None:
        async with self._turn:
            if self._nap is not None:
                self._nap.end()
                self._nap = None
            elif self._level:
                await self._engine.start(self._front)
                await self._engine.wait_ready()
            self._level = 0
