"""Who gets the caller when several are asked, step by step and without a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tonle.gateway.race import Lane, Race
from tonle.protocol.answers import Answer


class Caller:
    """Notes what reaches it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def attach(self, press: Callable[[bool], None]) -> None:
        self.seen.append("attach")

    def know(self, answer: Answer) -> None:
        self.seen.append(answer)

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.seen.append(status)

    def data(self, piece: bytes) -> None:
        self.seen.append(piece)


def says(status: int, *pieces: bytes, failure: Exception | None = None, go: asyncio.Event | None = None) -> Any:
    """A backend that sends a head at once, and the rest when it may."""

    async def run(lane: Lane) -> None:
        lane.attach(lambda full: None)
        lane.head(status, {})
        if go is not None:
            await go.wait()
        for piece in pieces:
            lane.data(piece)
            await asyncio.sleep(0)
        if failure is not None:
            raise failure

    return run


def race(main: Callable[[Race, Caller], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        caller = Caller()
        contest = Race(caller)
        async with asyncio.timeout(60):
            await main(contest, caller)
            await contest.end()
        assert all(lane.task.done() for lane in contest.lanes)

    asyncio.run(bounded())


def test_one_that_has_begun_closes_the_race() -> None:
    async def main(contest: Race, caller: Caller) -> None:
        go = asyncio.Event()
        contest.enter(says(200, b"a", b"b", go=go), lambda: caller.seen.append("first"))
        await contest.wait(0)
        assert contest.is_open and not caller.seen, "a head alone is no answer"
        go.set()
        await contest.wait()
        assert not contest.is_open
        contest.settle()
        assert caller.seen == ["first", "attach", 200, b"a", b"b"]

    race(main)


def test_the_first_byte_wins_and_the_rest_is_cancelled() -> None:
    async def main(contest: Race, caller: Caller) -> None:
        never, go = asyncio.Event(), asyncio.Event()
        slow = contest.enter(says(200, b"slow", go=never), lambda: None)
        contest.enter(says(200, b"quick", go=go), lambda: caller.seen.append("second"))
        go.set()
        await contest.wait()
        contest.settle()
        assert slow.task.cancelled()
        assert caller.seen == ["second", "attach", 200, b"quick"]

    race(main)


def test_an_error_waits_for_somebody_who_does_better() -> None:
    async def main(contest: Race, caller: Caller) -> None:
        go = asyncio.Event()
        contest.enter(says(500, b"broken"), lambda: None)
        await contest.wait()
        contest.enter(says(200, b"fine", go=go), lambda: None)
        assert not caller.seen
        go.set()
        await contest.wait()
        contest.settle()
        assert caller.seen == ["attach", 200, b"fine"]

    race(main)


def test_an_error_is_told_if_nobody_does() -> None:
    async def main(contest: Race, caller: Caller) -> None:
        contest.enter(says(200, failure=OSError("gone")), lambda: None)
        contest.enter(says(503, b"busy"), lambda: None)
        await contest.wait()
        contest.settle()
        assert caller.seen == ["attach", 503, b"busy"]

    race(main)


def test_the_first_failure_is_told_if_all_fail() -> None:
    async def main(contest: Race, caller: Caller) -> None:
        contest.enter(says(200, failure=OSError("first")), lambda: None)
        contest.enter(says(200, failure=OSError("second")), lambda: None)
        await contest.wait()
        with pytest.raises(OSError, match="first"):
            contest.settle()
        assert not caller.seen

    race(main)


def test_a_winner_that_breaks_off_is_not_replaced() -> None:
    async def main(contest: Race, caller: Caller) -> None:
        contest.enter(says(200, b"half", failure=OSError("cut")), lambda: None)
        contest.enter(says(200, go=asyncio.Event()), lambda: None)
        await contest.wait()
        with pytest.raises(OSError, match="cut"):
            contest.settle()
        assert caller.seen == ["attach", 200, b"half"]

    race(main)
