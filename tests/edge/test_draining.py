"""How a server stops: what was asked before is answered, callers are told to send no more, what does not end is cut."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading

import pytest

from tests.edge.running_server import RunningServer, read_to_end, replies, running_server, until

GET = b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"POST /half HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nabc"


def begun(place: RunningServer, path: str) -> None:
    until(lambda: path in place.handler.paths, f"{path} was not begun")


def drain(place: RunningServer) -> None:
    """Begin to; the gate is still shut."""
    place.start(place.server.stop(drain_s=30))
    until(lambda: place.call(lambda: all(each.retiring for each in place.server.connections)), "it does not drain")


def read_half(place: RunningServer) -> None:
    until(
        lambda: place.call(lambda: any(each._reader.incoming for each in place.server.connections)), "nothing is read"
    )


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle connections stay until the test is over."""
    monkeypatch.setattr("tonle.edge.connection.LAST_CALL_S", 20.0)


def test_answers_whose_head_has_not_left_say_that_they_are_the_last(loop: str) -> None:
    with running_server(loop) as place, place.connect() as whole, place.connect() as stream:
        whole.sendall(GET % b"/wait")
        stream.sendall(GET % b"/wait-before-stream")
        begun(place, "/wait")
        begun(place, "/wait-before-stream")  # has begun a reply, and written nothing
        drain(place)
        place.handler.gate.set()
        for caller in (whole, stream):
            (reply,) = replies(read_to_end(caller))
            assert (reply.status, reply.headers["connection"]) == (200, "close")
        place.until_alone()
        assert place.server.num_cut == 0


def test_a_stream_goes_on_to_its_end_and_is_followed_by_the_close(loop: str) -> None:
    with running_server(loop) as place, place.connect() as caller:
        caller.sendall(GET % b"/wait-stream")
        begun(place, "/wait-stream")
        received = caller.recv(65536)
        assert b"connection: close" not in received
        drain(place)
        place.handler.gate.set()
        (reply,) = replies(received + read_to_end(caller))
        assert reply.body.endswith(b"[DONE]\n\n")
        place.until_alone()


@pytest.mark.usefixtures("patient")
def test_the_request_after_a_stream_is_answered_too(loop: str) -> None:
    """The head has left without a word of the end: the caller sends on."""
    with running_server(loop) as place, place.connect() as caller:
        caller.sendall(GET % b"/wait-stream")
        begun(place, "/wait-stream")
        received = caller.recv(65536)
        drain(place)
        place.handler.gate.set()
        while not received.endswith(b"0\r\n\r\n"):
            received += caller.recv(65536)
        caller.sendall(GET % b"/next")
        (reply,) = replies(read_to_end(caller))
        assert (reply.body, reply.headers["connection"]) == (b"/next ", "close")


@pytest.mark.parametrize("sent", [HALF, HALF[:20], b"G"], ids=["in its body", "in its head", "in its first word"])
def test_a_request_that_was_read_in_part_is_read_on_and_answered(loop: str, sent: bytes) -> None:
    whole = HALF + b"def" if sent != b"G" else GET % b"/half"
    with running_server(loop) as place, place.connect() as caller:
        caller.sendall(sent)
        read_half(place)
        drain(place)
        caller.sendall(whole[len(sent) :])
        (reply,) = replies(read_to_end(caller))
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert place.handler.paths == ["/half"]
        place.until_alone()
        assert place.server.num_cut == 0


def test_pipelined_requests_are_all_answered_and_only_the_last_answer_says_so(loop: str) -> None:
    """RFC 9112, section 9.6: an answer that says close is the last; those after it would not be read."""
    paths = [b"/wait", *(b"/%d" % index for index in range(30)), b"/half"]
    with running_server(loop) as place, place.connect() as caller:
        caller.sendall(b"".join(GET % path for path in paths[:-1]) + HALF)
        begun(place, "/wait")
        drain(place)
        place.handler.gate.set()
        begun(place, "/29")
        caller.sendall(b"def")
        found = replies(read_to_end(caller))
        assert [reply.body.split()[0] for reply in found] == paths
        assert [reply.headers.get("connection") for reply in found] == [None] * 31 + ["close"]
        place.until_alone()
        assert place.server.num_cut == 0


@pytest.mark.usefixtures("patient")
def test_a_request_that_was_on_its_way_to_an_idle_connection_is_answered(loop: str) -> None:
    with running_server(loop) as place:
        caller = http.client.HTTPConnection("127.0.0.1", place.port, timeout=120)
        caller.request("GET", "/a")
        assert caller.getresponse().read() == b"/a "
        drain(place)
        caller.request("GET", "/b")
        reply = caller.getresponse()
        assert (reply.read(), reply.getheader("connection")) == (b"/b ", "close")
        place.until_alone()


def test_idle_connections_are_closed_and_no_new_ones_are_accepted(loop: str) -> None:
    with running_server(loop) as place, place.connect() as idle, place.connect() as silent:
        idle.sendall(GET % b"/a")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")
        drain(place)
        with pytest.raises(ConnectionRefusedError):
            place.connect()
        assert idle.recv(65536) == silent.recv(65536) == b""
        place.until_alone()


def test_connections_that_the_kernel_has_accepted_are_served(loop: str) -> None:
    with running_server(loop) as place:
        blocked = place.start(place.block())
        until(lambda: place.blocking, "it does not wait")
        callers = [place.connect() for _ in range(20)]
        for caller in callers:
            caller.sendall(GET % b"/a")
        place.loop.call_soon_threadsafe(lambda: place.loop.create_task(place.server.stop(drain_s=30)))
        place.unblock.set()
        blocked.result(120)
        for caller in callers:
            with caller:
                assert [reply.status for reply in replies(read_to_end(caller))] == [200]


@pytest.mark.parametrize("num_turns", [0, 1])
def test_a_connection_that_is_made_while_it_begins_to_stop_is_served(loop: str, num_turns: int) -> None:
    with running_server(loop) as place, socket.socket() as caller:
        caller.settimeout(60)
        sent = threading.Event()

        async def connect() -> None:
            stopping = asyncio.create_task(place.server.stop(drain_s=30))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            caller.connect(("127.0.0.1", place.port))  # the kernel's work: it does not wait for this event loop
            caller.sendall(GET % b"/a")
            sent.set()
            await stopping

        stopped = place.start(connect())
        assert sent.wait(60)
        assert [reply.status for reply in replies(read_to_end(caller))] == [200]
        stopped.result(120)


def test_an_answer_that_was_given_is_read_to_its_end(loop: str) -> None:
    """Nothing runs any more, but the caller reads slowly: its bytes still lie here."""
    with running_server(loop) as place, place.connect(receive_bytes=4096) as caller:
        caller.sendall(GET % b"/large")
        until(lambda: place.server.num_answered == 1, "it is not answered")
        stopped = place.start(place.server.stop(drain_s=30))
        until(lambda: place.server.draining, "it does not drain")
        for _ in range(3):
            place.call(lambda: None)
        received = b""
        while len(received) < 3_000_000:
            received += caller.recv(65536)
        (reply,) = replies(received + read_to_end(caller))
        assert len(reply.body) == 4_000_000
        stopped.result(120)


def test_half_a_request_is_told_why_it_is_cut(loop: str) -> None:
    with running_server(loop) as place, place.connect() as caller:
        caller.sendall(HALF)
        read_half(place)
        place.start(place.server.stop(drain_s=0.05)).result(120)
        (reply,) = replies(read_to_end(caller))
        assert (reply.status, reply.headers["connection"]) == (503, "close")
        assert "retry-after" in reply.headers and place.server.num_cut == 1 and not place.handler.seen


def test_a_second_signal_ends_what_runs(loop: str) -> None:
    with running_server(loop) as place, place.connect() as caller:
        caller.sendall(GET % b"/wait")
        begun(place, "/wait")
        stopped = place.start(place.server.stop(drain_s=600))
        until(lambda: place.server.draining, "it does not drain")
        place.call(place.server.end_requests)  # what the gateway does at the second signal
        assert read_to_end(caller) == b""
        stopped.result(120)
        assert (place.server.num_cut, place.handler.cancelled) == (1, ["/wait"])
        assert place.handler.seen[0].gone == "the server is shutting down"


def test_what_does_not_end_is_cut_when_the_time_to_drain_is_over(loop: str) -> None:
    with running_server(loop) as place, place.connect() as caller:
        caller.sendall(GET % b"/wait-stream")
        begun(place, "/wait-stream")
        place.start(place.server.stop(drain_s=0.05)).result(120)
        assert b"\r\n0\r\n\r\n" not in read_to_end(caller)
        assert place.server.num_cut == 1


def test_a_server_that_stops_waits_for_handlers_whose_callers_have_left(loop: str) -> None:
    """They close records."""
    with running_server(loop) as place:
        with place.connect() as caller:
            caller.sendall(GET % b"/tidy")
            begun(place, "/tidy")
        until(lambda: place.handler.cancelled, "the handler was not told")
        until(lambda: place.call(lambda: not place.server.connections), "the connection is still there")
        stopping = place.start(place.server.stop(drain_s=30))
        threading.Timer(0.1, place.handler.gate.set).start()
        stopping.result(120)
        assert place.handler.tidied
