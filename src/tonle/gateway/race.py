"""Several backends, one answer: the first to send a byte of it is passed on, and the others are cancelled.

Does: stand between backends and the sink that takes the answer, let one through, cancel the rest. Does not: decide
which backends run or when (`attempt.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tonle.edge.client import TOO_LARGE, Sink, UpstreamError
from tonle.protocol.answers import Answer

MAX_ANSWER_BYTES = 1024**2  # of an error that is held


class Lane:
    """What one backend sends goes through here. Before the first byte of an answer nothing is handed on."""

    task: asyncio.Task[None]

    def __init__(self, race: Race, on_win: Callable[[], None]) -> None:
        self.status = 0
        self.asked = False  # the request was sent, or is being sent
        self._race = race
        self._on_win = on_win
        self._headers: dict[str, str] = {}
        self._held: list[bytes] = []  # of an error, which counts only if no other lane does better
        self._num_held = 0  # bytes
        self._press: Callable[[bool], None] | None = None
        self._known: Answer | None = None

    def attach(self, press: Callable[[bool], None]) -> None:
        self._press = press
        self.asked = True

    def know(self, answer: Answer) -> None:
        self._known = answer
        if self._race.winner is self:
            self._race.sink.know(answer)

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self._headers = status, headers
        self._held.clear()
        self._num_held = 0

    def data(self, piece: bytes) -> None:
        if self._race.winner is None and self.status == 200:
            self.win()
        if self._race.winner is self:
            self._race.sink.data(piece)
        else:
            self._hold(piece)

    def _hold(self, piece: bytes) -> None:
        self._num_held += len(piece)
        if self._num_held > MAX_ANSWER_BYTES:
            raise UpstreamError(TOO_LARGE, f"an error of more than {MAX_ANSWER_BYTES} bytes", began=True)
        self._held.append(piece)

    def win(self) -> None:
        """With a first byte; or, when no other lane is left, with the reply it has."""
        self._race.winner = self
        self._on_win()
        for lane in self._race.lanes:
            if lane is not self:
                lane.task.cancel()
        if self._press is not None:
            self._race.sink.attach(self._press)
        if self._known is not None:
            self._race.sink.know(self._known)
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
        """No lane has won, and one still may."""
        return self.winner is None and not all(lane.task.done() for lane in self.lanes)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Until all lanes have ended, or until `timeout_s` have passed."""
        await asyncio.wait([lane.task for lane in self.lanes], timeout=timeout_s)

    def settle(self) -> Lane:
        """When all have ended: the winner, or its failure raised; without a winner any reply, else the first failure."""
        failures = {lane: lane.task.exception() for lane in self.lanes if not lane.task.cancelled()}
        if self.winner is not None:
            if (failure := failures[self.winner]) is not None:
                raise failure
            return self.winner
        for lane, failure in failures.items():
            if failure is None:
                lane.win()
                return lane
        raise next(failure for failure in failures.values() if failure is not None)

    async def end(self) -> None:
        """However it ended: no lane runs on."""
        running = [lane.task for lane in self.lanes if not lane.task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
