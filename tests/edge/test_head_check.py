"""The check of a head: what it refuses is answered without keeping the body, and nothing of the rest is lost."""

from __future__ import annotations

import hashlib
import http.client
import tracemalloc
from collections.abc import Iterator

import pytest

from tests.edge.running_server import RunningServer, read_to_end, replies, running_server, until
from tonle.edge.exchange import Exchange
from tonle.edge.reader import PASSED_BYTES
from tonle.edge.unread_body import FIRST_BYTES
from tonle.errors import CallerError

POST = b"POST %b HTTP/1.1\r\nHost: x\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
MIB = 1024**2


class UnknownCallerError(CallerError):
    status = 401


def check(exchange: Exchange) -> None:
    if exchange.path == "/refused":
        raise UnknownCallerError("who are you?")
    exchange.wants_body = exchange.path != "/unused"


@pytest.fixture(scope="module")
def checked() -> Iterator[RunningServer]:
    with running_server(check_head=check) as place:
        yield place


@pytest.fixture(autouse=True)
def _forget(checked: RunningServer) -> None:
    checked.handler.seen.clear()


def framed(path: bytes, body: bytes, *, chunked: bool = False) -> bytes:
    if chunked:
        half = len(body) // 2 or 1
        pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:half], body[half:]) if piece)
        return POST % path + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
    return POST % path + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [0, 1, FIRST_BYTES + 1, PASSED_BYTES])
def test_a_small_body_is_passed_over_and_the_connection_goes_on(
    checked: RunningServer, size: int, *, chunked: bool
) -> None:
    body = bytes(index % 251 for index in range(size))
    first, second, last = checked.ask(framed(b"/refused", body, chunked=chunked) + framed(b"/taken", b"abc") + LAST)
    assert (first.status, first.body, second.body, last.status) == (401, b"who are you?", b"/taken abc", 200)
    assert "connection" not in first.headers
    refused, taken = checked.handler.seen[:2]
    assert refused.body == b"" and taken.unread is None and refused.unread is not None
    assert refused.unread.declared == (None if chunked else size)
    assert (refused.unread.num_received, refused.unread.first) == (size, body[:FIRST_BYTES])
    assert refused.unread.sha256() == hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_answered_before_it_has_come(checked: RunningServer, *, chunked: bool) -> None:
    whole = framed(b"/refused", b"x" * 8 * MIB, chunked=chunked)
    with checked.connect() as caller:
        caller.sendall(whole[: 2 * PASSED_BYTES])
        (reply,) = replies(read_to_end(caller))  # though most of it was not sent
    assert (reply.status, reply.headers["connection"]) == (401, "close")
    (refused,) = checked.handler.seen
    least = PASSED_BYTES if chunked else FIRST_BYTES  # of a length that is known, no more is waited for than is kept
    assert refused.unread is not None and least < refused.unread.num_received <= 2 * PASSED_BYTES
    assert chunked or refused.unread.num_received < PASSED_BYTES
    assert refused.unread.declared == (None if chunked else 8 * MIB)
    assert refused.unread.sha256() == hashlib.sha256(b"x" * refused.unread.num_received).hexdigest()


def test_a_caller_who_sends_all_before_it_reads_gets_its_answer(checked: RunningServer) -> None:
    for _ in range(5):
        caller = http.client.HTTPConnection("127.0.0.1", checked.port, timeout=120)
        caller.request("POST", "/refused", b"x" * 8 * MIB)  # raises if the connection is reset
        assert caller.getresponse().status == 401
        caller.close()


def test_bodies_that_are_refused_take_no_memory(checked: RunningServer) -> None:
    whole = framed(b"/refused", b"x" * 8 * MIB)
    tracemalloc.start()
    try:
        for _ in range(10):
            assert [reply.status for reply in replies(checked.send(whole))] == [401]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MIB, peak


def test_no_body_is_asked_for(checked: RunningServer) -> None:
    with checked.connect() as caller:
        caller.sendall(POST % b"/refused" + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        (reply,) = replies(read_to_end(caller))
    assert (reply.status, reply.interim, reply.headers["connection"]) == (401, [], "close")


def test_nothing_after_a_body_that_was_not_read_is_taken_for_a_request(checked: RunningServer) -> None:
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    for data in (framed(b"/refused", smuggled * (2 * PASSED_BYTES // len(smuggled))),
                 POST % b"/refused" + b"Content-Length: 900\r\nExpect: 100-continue\r\n\r\n" + smuggled * 20):  # fmt: skip
        assert [reply.status for reply in checked.ask(data)] == [401]
    assert set(checked.handler.paths) == {"/refused"}


@pytest.mark.parametrize("size", [10, 8 * MIB])
def test_a_body_that_is_not_wanted_is_not_kept(checked: RunningServer, size: int) -> None:
    reply = checked.ask(framed(b"/unused", b"x" * size) + LAST)[0]
    assert (reply.status, reply.body) == (200, b"/unused ")


def test_a_refused_request_that_does_not_end_is_told_why_and_not_that_it_was_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tonle.edge.server.SWEEP_S", 0.02)
    with running_server(check_head=check, read_timeout_s=0.2) as place, place.connect() as caller:
        caller.sendall(framed(b"/refused", b"x" * 100)[:-1])
        assert [reply.status for reply in replies(read_to_end(caller))] == [401]


def test_each_of_several_sent_ahead_gets_its_own_answer(checked: RunningServer) -> None:
    data = b"".join(framed(b"/refused" if index % 2 else b"/%d" % index, b"x" * index) for index in range(40))
    found = checked.ask(data + LAST)
    assert [reply.status for reply in found] == [401 if index % 2 else 200 for index in range(40)] + [200]
    until(lambda: checked.call(lambda: checked.server.held.num_bytes) == 0, "something is still held")


def test_a_check_that_fails_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    def broken(exchange: Exchange) -> None:
        raise ZeroDivisionError("on purpose")

    with running_server(check_head=broken) as place:
        place.ask(framed(b"/a", b"abc") + LAST)
        assert isinstance(place.handler.seen[0].refusal, ZeroDivisionError) and place.handler.seen[0].body == b""
