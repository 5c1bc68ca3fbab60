"""How connections end: timeouts, half-closed and reset by the caller, given up by us. Nothing is kept of them."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import tracemalloc

import pytest

from tests.edge.running_server import RunningServer, read_to_end, replies, running_server, until
from tonle.edge.server import ServerLimits

GET = b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.edge.server.SWEEP_S", 0.02)


def begun(place: RunningServer, path: str) -> None:
    until(lambda: path in place.handler.paths, f"{path} was not begun")


# -- half-closed: RFC 9112, section 9.6, and every program that sends, shuts down, and reads to the end


@pytest.mark.parametrize("path", [b"/a", b"/stream", b"/large", b"/large-stream"])
def test_a_caller_who_sends_no_more_gets_its_whole_answer(loop: str, path: bytes) -> None:
    with running_server(loop) as place:
        with place.connect() as caller:
            caller.sendall(GET % path)
            caller.shutdown(socket.SHUT_WR)
            (reply,) = replies(read_to_end(caller))
        assert reply.status == 200 and reply.body.endswith((b"/a ", b"[DONE]\n\n", b"xxx"))
        assert place.handler.cancelled == []
        place.until_alone()


@pytest.mark.parametrize("path", [b"/wait", b"/wait-stream", b"/wait-sound"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_it_may_wait_long(loop: str, path: bytes, version: bytes) -> None:
    with running_server(loop) as place:
        with place.connect() as caller:
            caller.sendall(b"GET %b HTTP/%b\r\nHost: x\r\n\r\n" % (path, version))
            begun(place, path.decode())
            caller.shutdown(socket.SHUT_WR)
            (connection,) = place.call(lambda: list(place.server.connections))
            until(lambda: connection._half_closed, "the end was not seen")
            assert not select.select([], [], [], 0.3)[0]  # several looks for a reset
            place.handler.gate.set()
            (reply,) = replies(read_to_end(caller))
        assert reply.status == 200 and place.handler.cancelled == []
        assert not (version == b"1.0" and reply.interim)
        place.until_alone()


def test_all_pipelined_requests_of_a_half_closed_caller_are_answered(loop: str) -> None:
    with running_server(loop) as place:
        with place.connect() as caller:
            caller.sendall(b"".join(GET % b"/%d" % index for index in range(40)))
            caller.shutdown(socket.SHUT_WR)
            found = replies(read_to_end(caller))
        assert [reply.body for reply in found] == [b"/%d " % index for index in range(40)]
        place.until_alone()


def test_rfc_9112_8_half_a_request_is_not_run(loop: str) -> None:
    with running_server(loop) as place:
        for data in (
            b"GET /a HTTP/1.1\r\nHost: x\r\n",
            b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nab",
            b"",
        ):
            with place.connect() as caller:
                caller.sendall(data)
                caller.shutdown(socket.SHUT_WR)
                assert read_to_end(caller) == b""
        place.until_alone()
        assert place.handler.seen == []


@pytest.mark.parametrize("path", ["/wait", "/stream-slowly", "/wait-sound"])
def test_a_caller_who_closes_is_noticed_before_the_answer(loop: str, path: str) -> None:
    with running_server(loop) as place:
        caller = place.connect()
        caller.sendall(GET % path.encode())
        begun(place, path)
        if path != "/wait":
            assert caller.recv(65536)
        caller.close()
        until(lambda: place.handler.cancelled == [path], "the request was not cancelled")
        assert place.handler.seen[0].gone == "the caller hung up"
        place.until_alone()


@pytest.mark.parametrize("path", ["/wait", "/wait-stream", "/large-stream"])
def test_a_reset_cancels(loop: str, path: str) -> None:
    with running_server(loop) as place:
        caller = place.connect(receive_bytes=4096)
        caller.sendall(GET % path.encode())
        begun(place, path)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.close()
        until(lambda: place.handler.cancelled == [path], "the request was not cancelled")
        place.until_alone()


# -- time


def test_a_request_that_does_not_arrive_is_given_up(loop: str) -> None:
    with running_server(loop, read_timeout_s=0.1) as place:
        for data in (b"G", b"GET /a HTTP/1.1\r\n", b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab"):
            (reply,) = place.ask(data)
            assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert place.handler.seen == []


def test_a_second_request_that_does_not_arrive_does_not_end_the_first(loop: str) -> None:
    with running_server(loop, read_timeout_s=0.1) as place, place.connect() as caller:
        caller.sendall(GET % b"/wait" + b"GET /slow HTT")
        begun(place, "/wait")
        (connection,) = place.call(lambda: list(place.server.connections))
        until(lambda: connection._fault, "the second was not given up")
        place.handler.gate.set()
        assert [reply.status for reply in replies(read_to_end(caller))] == [200, 408]
        assert place.handler.paths == ["/wait"]


def hurry(place: RunningServer, **limits: float) -> None:
    """From now on: a caller that is slow to begin is not given up before."""
    place.server.limits = ServerLimits(**limits)


@pytest.mark.parametrize("asks", [False, True])
def test_idle_connections_are_closed(loop: str, *, asks: bool) -> None:
    with running_server(loop) as place, place.connect() as caller:
        if asks:
            caller.sendall(GET % b"/a")
            assert caller.recv(65536).startswith(b"HTTP/1.1 200")
        hurry(place, idle_timeout_s=0.1)
        assert read_to_end(caller) == b"" and len(place.handler.seen) == asks
        place.until_alone()


def test_empty_lines_do_not_keep_a_connection(loop: str) -> None:
    with running_server(loop, idle_timeout_s=0.2) as place, place.connect() as caller:
        for _ in range(3000):
            with contextlib.suppress(ConnectionError):
                caller.sendall(b"\r\n")
            if not place.call(lambda: place.server.connections) or select.select([caller], [], [], 0.01)[0]:
                break
        else:
            raise AssertionError("it stayed open")


@pytest.mark.parametrize(
    "data",
    [GET % b"/large-stream", GET % b"/large", b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
     b"nonsense\r\n\r\n"],
    ids=["stream", "whole", "whole, closing", "refusal"],
)  # fmt: skip
def test_a_caller_who_never_reads_is_given_up(loop: str, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.edge.connection.LINGER_S", 0.2)
    with running_server(loop) as place, place.connect(receive_bytes=4096) as caller:
        caller.sendall(data)
        until(lambda: place.server.num_answered or place.handler.seen, "nothing was begun")
        hurry(place, write_timeout_s=0.2, idle_timeout_s=0.2)
        place.until_alone()


def test_half_heads_of_500_callers_take_little_memory_and_are_swept(loop: str) -> None:
    half = GET[:-2] % b"/a" + b"A: " + b"x" * 2000 + b"\r\n" + b"B: " + b"y" * 2000
    with running_server(loop, read_timeout_s=1.0) as place, contextlib.ExitStack() as callers:
        tracemalloc.start()
        try:
            for _ in range(500):
                callers.enter_context(place.connect()).sendall(half)
            until(lambda: len(place.server.connections) == 500 or place.server.num_answered, "they did not come")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 500 * 32 * 1024, peak  # far below 500 times MAX_HEAD_BYTES
        until(lambda: place.server.num_answered == 500, "they were not swept")
        assert place.handler.seen == []
        callers.close()
        place.until_alone()


def test_no_task_is_left_behind(loop: str) -> None:
    with running_server(loop) as place:
        for data in (GET % b"/a", GET % b"/fail", GET % b"/break", b"nonsense\r\n\r\n"):
            with place.connect() as caller:
                caller.sendall(data)
                caller.shutdown(socket.SHUT_WR)
                read_to_end(caller)
        place.until_alone()
        names = place.call(lambda: [repr(task) for task in asyncio.all_tasks() if "ServerConnection" in repr(task)])
        assert names == []
