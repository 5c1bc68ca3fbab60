"""Requests share one bound of memory: a caller who fills it is refused, others are not, and it empties again."""

from __future__ import annotations

import contextlib
import socket
import struct
import tracemalloc
from collections.abc import Callable

import pytest

from tests.edge.running_server import RunningServer, read_to_end, replies, running_server, until

MIB = 1024**2
HEAD = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
GET = b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n"


def held(place: RunningServer) -> int:
    return place.call(lambda: place.server.held.num_bytes)


def test_callers_one_byte_short_hold_no_more_than_the_bound_and_others_get_through(loop: str) -> None:
    with running_server(loop, request_memory_bytes=8 * MIB) as place, contextlib.ExitStack() as stack:
        callers = [stack.enter_context(place.connect()) for _ in range(40)]
        for caller in callers:
            caller.sendall(HEAD % (b"/big", MIB) + b"x" * (MIB - 1))
            assert held(place) <= 8 * MIB
        small = HEAD % (b"/small", 1000) + b"x" * 1000
        with place.connect() as honest:
            honest.sendall(small)
            assert honest.recv(65536).startswith(b"HTTP/1.1 200")
        assert place.handler.paths.count("/small") == 1
        until(lambda: sum(map(_answered, callers)) >= 32, "none was refused")
        refused = [caller for caller in callers if _answered(caller)]
        assert len(refused) < 40  # no more than needed
        (reply,) = replies(read_to_end(refused[0]))
        assert (reply.status, reply.headers["connection"]) == (503, "close") and b"memory" in reply.body
        (exchange, *_) = [each for each in place.handler.seen if each.path == "/big"]
        assert exchange.unread is not None and exchange.unread.declared == MIB and exchange.body == b""
        callers[-1].sendall(b"x")  # one that was kept is answered in full
        stack.close()
        place.until_alone()
        assert held(place) == 0


def _answered(caller: socket.socket) -> bool:
    caller.setblocking(False)
    try:
        return bool(caller.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        caller.settimeout(120)


def test_where_all_have_been_read_the_next_one_is_refused(loop: str) -> None:
    with running_server(loop, request_memory_bytes=2 * MIB) as place, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(place.connect()).sendall(HEAD % (b"/wait", MIB - 2000) + b"x" * (MIB - 2000))
        until(lambda: place.handler.paths == ["/wait"] * 2, "they were not begun")
        (reply,) = place.ask(HEAD % (b"/next", 8000) + b"x" * 8000)
        assert reply.status == 503 and reply.headers["connection"] == "close"
        assert place.handler.seen[-1].refusal is not None
        place.handler.gate.set()
        until(lambda: held(place) == 0, "something is still held")
        assert place.handler.cancelled == []


def test_heads_count_too(loop: str) -> None:
    half = GET[:-2] % b"/a" + b"A: " + b"x" * 30_000 + b"\r\n"
    with running_server(loop, request_memory_bytes=MIB) as place, contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(place.connect()).sendall(half)
        until(lambda: place.server.num_answered >= 20, "none was refused")
        assert 0 < held(place) <= MIB and not place.handler.seen
        stack.close()
        place.until_alone()
        assert held(place) == 0


def test_a_body_in_tiny_chunks_takes_no_more_memory_than_its_bytes() -> None:
    """A piece of two bytes is an object of more than thirty."""
    size = 400_000
    with running_server(max_body_bytes=size) as place:
        data = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"2\r\nab\r\n" * (size // 2)
        with place.connect() as caller:
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                caller.sendall(data)
                until(lambda: held(place) > size, "it was not read")
                now, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert now - before < 2 * size + MIB // 2, now - before


def _whole(place: RunningServer) -> None:
    place.ask(b"POST /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 9\r\n\r\n" + b"x" * 9)


def _cut(data: bytes, *, reset: bool = False) -> Callable[[RunningServer], None]:
    def end(place: RunningServer) -> None:
        caller = place.connect()
        caller.sendall(data)
        until(lambda: held(place) > 0, "nothing is held")
        if reset:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.close()

    return end


def _asked(data: bytes) -> Callable[[RunningServer], None]:
    return lambda place: place.send(data) and None


BODY = b"x" * 50_000
BEGUN = HEAD % (b"/wait", len(BODY)) + BODY
ENDINGS: dict[str, Callable[[RunningServer], None]] = {
    "answered": _whole,
    "handler fails": _asked(HEAD % (b"/fail", 9) + b"x" * 9 + b"nonsense\r\n\r\n"),
    "handler gives up in the middle": _asked(HEAD % (b"/break", 9) + b"x" * 9),
    "not HTTP in its body": _asked(b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd"),
    "too large": _asked(HEAD % (b"/a", 200_000) + b"x" * 200_000),
    "too large, chunked": _asked(
        b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"fff\r\n" + b"x" * 4095 + b"\r\n" * 60
    ),
    "too slow": _asked(HEAD % (b"/a", 9) + b"x"),
    "closed in its body": _cut(BEGUN[:-1]),
    "reset in its body": _cut(BEGUN[:-1], reset=True),
    "closed in its head": _cut(BEGUN[:30]),
    "reset while it is answered": _cut(BEGUN, reset=True),
    "reset while others wait behind it": _cut(BEGUN * 30, reset=True),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_nothing_is_held_after(loop: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.edge.server.SWEEP_S", 0.02)
    monkeypatch.setattr("tonle.edge.connection.LINGER_S", 0.1)
    read_timeout_s = (
        1.0 if name == "too slow" else 120.0
    )  # else it may be over before a busy test has seen that bytes are held
    with running_server(loop, max_body_bytes=100_000, read_timeout_s=read_timeout_s) as place:
        ENDINGS[name](place)
        place.until_alone()
        assert held(place) == 0


def test_nothing_is_held_after_a_stop(loop: str) -> None:
    with running_server(loop) as place, place.connect() as one, place.connect() as other:
        one.sendall(BEGUN * 3)
        other.sendall(BEGUN[:-1])
        until(lambda: held(place) > 4 * len(BODY) - 1000, "they have not come")
        place.start(place.server.stop(drain_s=0.05)).result(120)
        until(lambda: held(place) == 0, "something is still held")
        assert place.server.num_cut == 4
