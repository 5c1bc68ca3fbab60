"""Several backends, one answer: the first to send a byte of it has the caller, and the others are sent away.

Does: stand between backends and whoever takes the answer, let one through, cancel the rest. Does not: decide who runs
or when (`sending.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tonle.edge.client import Sink
from tonle.protocol.answers import Answer


class Lane:
    """What one backend sends goes through here. Before the first byte of an answer nothing is handed on."""

    task: asyncio.Task[None]

    def __init__(self, race: Race, on_win: Callable[[], None]) -> None:
        self.status = 0
        self._race = race
        self._on_win = on_win
        self._headers: dict[str, str] = {}
        self._held: list[bytes] = []  # of an error, which counts only if nobody does better
        self._press: Callable[[bool], None] | None = None

    def attach(self, press: Callable[[bool], None]) -> None:
        self._press = press

    def know(self, answer: Answer) -> None:
        """Only servers elsewhere race."""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self._headers = status, headers
        self._held.clear()

    def data(self, piece: bytes) -> None:
        if self._race.winner is None and self.status == 200:
            self.win()
        if self._race.winner is self:
            self._race.sink.data(piece)
        else:
            self._held.append(piece)

    def win(self) -> None:
        """With a first byte; or, when nobody else is left, with whatever was said."""
        self._race.winner = self
        self._on_win()
        for lane in self._race.lanes:
            if lane is not self:
                lane.task.cancel()
        if self._press is not None:
            self._race.sink.attach(self._press)
        self._race.sink.head(self.status, self._headers)
        for piece in self._held:
            self._race.sink.data(piece)
        self._held.clear()


class Race:
    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.lanes: list[Lane] = []
        self.winner: Lane | None = None

    def enter(self, run: Callable[[Lane], Coroutine[Any, Any, None]], on_win: Callable[[], None]) -> Lane:
        lane = Lane(self, on_win)
        lane.task = asyncio.create_task(run(lane))
        self.lanes.append(lane)
        return lane

    @property
    def is_open(self) -> bool:
        """Nobody has won, and somebody still may."""
        return self.winner is None and not all(lane.task.done() for lane in self.lanes)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Until everybody has ended, or until `timeout_s` have passed."""
        await asyncio.wait([lane.task for lane in self.lanes], timeout=timeout_s)

    def settle(self) -> None:
        """When all have ended: raises the winner's failure; without a winner takes any reply, else the first failure."""
        failures = {lane: lane.task.exception() for lane in self.lanes if not lane.task.cancelled()}
        if self.winner is not None:
            if (failure := failures[self.winner]) is not None:
                raise failure
            return
        for lane, failure in failures.items():
            if failure is None:
                lane.win()
                return
        raise next(failure for failure in failures.values() if failure is not None)

    async def end(self) -> None:
        """However it ended: nobody runs on."""
        running = [lane.task for lane in self.lanes if not lane.task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
