"""A caller who is gone, or reads nothing, costs nothing: the work is cancelled."""

from __future__ import annotations

import socket
import time
from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes.front import FakeFront
from tests.http.serving import serving
from tonle.engine.request import Delta

HEADERS = b"host: localhost\r\ncontent-type: application/json\r\n"
PATH = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def connect(url: str, body: dict[str, Any], path: str = PATH) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(120)
    connection.connect((host, int(port)))
    raw = msgspec.json.encode(body)
    connection.sendall(b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (path.encode(), HEADERS, len(raw), raw))
    return connection


def test_hangup_during_a_stream(front: FakeFront, url: str) -> None:
    front.stall_after = 25
    with connect(url, {**HELLO, "stream": True}) as connection:
        received = b""
        while b'"content":","' not in received:
            received += connection.recv(4096)
        assert front.cancelled.empty()
    assert front.cancelled.get(timeout=60) == front.submitted[0][0].request_id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stall_after", [0, 5])
def test_hangup_before_the_answer(front: FakeFront, url: str, stream: bool, stall_after: int) -> None:
    front.stall_after = stall_after
    with connect(url, {**HELLO, "stream": stream}):
        for _ in range(12_000):
            if front.submitted:
                break
            time.sleep(0.01)
        assert front.submitted and front.cancelled.empty()
    assert front.cancelled.get(timeout=60) == front.submitted[0][0].request_id


def test_hangup_cancels_every_prompt(front: FakeFront, url: str) -> None:
    front.stall_after = 3
    with connect(url, {"prompt": ["a", "b", "c"]}, "/v1/completions"):
        for _ in range(12_000):
            if len(front.submitted) == 3:
                break
            time.sleep(0.01)
        assert front.cancelled.empty()
    assert sorted(front.cancelled.get(timeout=60) for _ in range(3)) == sorted(g.request_id for g, _ in front.submitted)


def test_hangup_in_the_middle_of_the_body(front: FakeFront, url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST %b HTTP/1.1\r\n%bcontent-length: 500\r\n\r\n{" % (PATH.encode(), HEADERS))
    assert httpx.get(url + "/health").status_code == 200
    assert not front.submitted


def test_finished_requests_are_not_cancelled(front: FakeFront, client: httpx.Client) -> None:
    for stream in (False, True):
        assert client.post(PATH, json={**HELLO, "stream": stream}).status_code == 200
    assert front.cancelled.empty()


def test_caller_who_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.edge.server.SWEEP_S", 0.05)
    front = FakeFront()
    # 100 MB: more than the kernel buffers on both sides
    front.script = lambda prompt, config, index: [Delta(0, "x" * 50_000, [1]) for _ in range(2000)]  # type: ignore[method-assign]
    front.stall_after = 1999  # and the engine is not at its end
    with (
        serving(front, write_timeout_s=0.2, drain_s=1.0) as url,
        connect(url, {**HELLO, "stream": True}),
    ):
        assert front.cancelled.get(timeout=120) == front.submitted[0][0].request_id
        assert httpx.get(url + "/health").status_code == 200


def test_write_timeout_is_per_write_not_per_stream() -> None:
    """A slow engine is not a slow reader."""
    front = FakeFront(lambda prompt, index: "abcd")
    front.delay_s = 0.05
    with serving(front, write_timeout_s=0.03) as url:
        reply = httpx.post(url + PATH, json={**HELLO, "stream": True})
    assert reply.text.endswith("data: [DONE]\n\n") and front.cancelled.empty()
