"""Answers come in the order of their requests, however requests and answers fall between the turns of the event loop."""

from __future__ import annotations

import random

import pytest

from tests.edge.running_server import Reply, read_to_end, replies, running_server, until

NUM_REQUESTS = 400


def request(index: int) -> bytes:
    """Those that are answered at once, later, in pieces, with a body, refused, asked to wait for 100 Continue."""
    kinds = (
        b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % index,
        b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody" % index,
        b"GET /turns/%d HTTP/1.1\r\nHost: x\r\n\r\n" % index,
        b"GET /stream-id HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /%d HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\nbody" % index,
    )
    return kinds[index % len(kinds)].replace(b"Host: x\r\n", b"Host: x\r\nX-Request-Id: id-%d\r\n" % index)


def in_order(found: list[Reply]) -> None:
    assert [reply.headers["x-request-id"] for reply in found[:NUM_REQUESTS]] == [f"id-{i}" for i in range(NUM_REQUESTS)]


@pytest.mark.parametrize("seed", range(8))
def test_pipelined_requests_that_come_in_pieces_are_answered_in_order(loop: str, seed: int) -> None:
    draw = random.Random(seed)
    data = b"".join(request(index) for index in range(NUM_REQUESTS))
    with running_server(loop) as place, place.connect() as caller:
        while data:
            size = draw.choice((1, 20, 60, 61, 300, 3000, 9000))
            caller.sendall(data[:size])
            data = data[size:]
            if draw.random() < 0.3:
                place.call(lambda: None)  # a turn or two of its loop
        caller.sendall(b"nonsense\r\n\r\n")  # a fault waits for its turn, too
        found = replies(read_to_end(caller))
    in_order(found)
    assert found[-1].status == 400 and len(found) == NUM_REQUESTS + 1


def test_bytes_that_come_between_the_end_of_an_answer_and_the_next_turn(loop: str) -> None:
    """A has been answered and B waits behind it; C arrives before the event loop turns. C must not overtake B."""
    get = b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n"
    with running_server(loop) as place, place.connect() as caller:
        caller.sendall(get % b"/block-after" + get % b"/b")
        until(lambda: place.handler.blocking, "it was not begun")
        caller.sendall(get % b"/c" + b"GET /d HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        place.handler.gate.set()
        assert [reply.body for reply in replies(read_to_end(caller))] == [b"/block-after ", b"/b ", b"/c ", b"/d "]
        assert place.handler.paths == ["/block-after", "/b", "/c", "/d"]
