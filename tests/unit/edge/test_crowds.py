"""Callers who are refused are many: each is answered, and none of it fills a turn of the event loop."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from tonle.edge import lingering as module
from tonle.edge.lingering import MAX_CALLERS, Lingering
from tonle.edge.refusal_turns import RefusalTurns


async def until(done: Any) -> None:
    for _ in range(120_000):
        if done():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


def test_refusals_are_answered_in_order_and_not_all_at_once() -> None:
    async def main() -> None:
        turns, answered = RefusalTurns(), list[int]()
        for number in range(5):
            turns.take(lambda number=number: answered.append(number))  # type: ignore[misc]
        assert answered == [0]  # at once; the others leave the event loop to other callers first
        await until(lambda: len(answered) == 5)
        assert answered == [0, 1, 2, 3, 4]
        await until(lambda: not turns._pausing)
        turns.take(lambda: answered.append(5))
        assert answered[-1] == 5  # nothing is waited for when none came before

    asyncio.run(main())


class Transport:
    def __init__(self) -> None:
        self.aborted = False

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def get_extra_info(self, _: str) -> socket.socket:
        return socket.socket()


def test_one_caller_is_read_at_a_time_and_each_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_both_ended", lambda transport: transport is ended)
    monkeypatch.setattr(module, "READ_EVERY_S", 0.0)
    ended: Any = Transport()

    async def main() -> None:
        crowd, reads = Lingering(), list[int]()
        for number, transport in enumerate([Transport(), ended, Transport()]):
            crowd.add(transport, lambda number=number: reads.append(number))  # type: ignore[arg-type,misc]
        assert not reads
        await until(lambda: len(reads) >= 4)
        assert reads[:4] == [0, 2, 0, 2]
        assert ended.aborted

    asyncio.run(main())


def test_a_crowd_is_bounded() -> None:
    async def main() -> None:
        crowd, transports = Lingering(), [Transport() for _ in range(MAX_CALLERS + 3)]
        for transport in transports:
            crowd.add(transport, lambda: None)  # type: ignore[arg-type]
        assert [transport.aborted for transport in transports] == [True] * 3 + [False] * MAX_CALLERS

    asyncio.run(main())


def test_the_kernel_tells_when_both_have_ended() -> None:
    """A caller that has sent more than we read, got our answer and closed: all of it by the kernel's word alone."""

    class Reported:
        def __init__(self, ours: socket.socket) -> None:
            self._ours = ours

        def get_extra_info(self, _: str) -> socket.socket:
            return self._ours

    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, caller:
        told = Reported(ours)
        caller.sendall(b"x" * 1000)
        ours.sendall(b"no")
        ours.shutdown(socket.SHUT_WR)
        assert not module._both_ended(told)  # type: ignore[arg-type]
        assert caller.recv(10) == b"no"
        caller.close()
        assert module._both_ended(told)  # type: ignore[arg-type]
