"""Callers of `tonle serve` who send without end, slowly, or nothing: each is refused or given up, and others are served."""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from tests.edge.running_server import Reply, read_to_end, replies, until
from tests.fakes.front import FakeFront
from tests.http.serving import serving
from tonle.edge.server import ServerLimits

PATH = "/v1/chat/completions"
BODY = b'{"messages": [{"role": "user", "content": "hi"}]}'
POST = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, serving_quickly(patch) as found:
        yield found


@contextlib.contextmanager
def serving_quickly(patch: pytest.MonkeyPatch, **settings: object) -> Iterator[str]:
    """As `tonle serve` serves, on uvloop, with shorter times."""
    limits = functools.partial(ServerLimits, read_timeout_s=0.5, idle_timeout_s=0.5)
    patch.setattr("tonle.gateway.gateway.ServerLimits", limits)
    patch.setattr("tonle.edge.server.SWEEP_S", 0.02)
    with serving(FakeFront(), **settings) as found:
        yield found


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=120)


def answered(url: str) -> None:
    assert httpx.post(url + PATH, content=BODY, headers={"content-type": "application/json"}).status_code == 200


def ask(url: str, data: bytes) -> list[Reply]:
    with connect(url) as caller:
        with contextlib.suppress(ConnectionError):
            caller.sendall(data)
        return replies(read_to_end(caller))


ENDLESS: dict[str, tuple[bytes, bytes]] = {  # how it begins, what is repeated
    "headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"A: " + b"x" * 1000 + b"\r\n"),
    "one header": (b"GET /health HTTP/1.1\r\nA: ", b"x" * 1000),
    "a URL": (b"GET /", b"x" * 1000),
    "a method": (b"G", b"E" * 1000),
    "chunk extensions": (CHUNKED, b"1;" + b"a" * 1000 + b"\r\nx\r\n"),
    "one chunk extension": (CHUNKED + b"1;", b"a" * 1000),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"A: " + b"x" * 1000 + b"\r\n"),
    "chunks": (CHUNKED, b"3e8\r\n" + b"x" * 1000 + b"\r\n"),
    "empty lines": (b"", b"\r\n" * 500),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_refused_and_the_connection_closed(url: str, name: str) -> None:
    start, again = ENDLESS[name]
    with connect(url) as caller:
        caller.sendall(start)
        with pytest.raises(ConnectionError):
            for _ in range(200_000):  # 12 GiB; far less is taken
                caller.sendall(again * 64)
    answered(url)


SLOW: dict[str, tuple[bytes, int | None]] = {  # what is sent byte by byte, and what is answered
    "head": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 5000, 408),
    "body": (POST + b"Content-Length: 5000\r\n\r\n" + b"x" * 4999, 408),
    "chunks": (CHUNKED + b"1\r\nx\r\n" * 1000, 408),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n" + b"A: b\r\n" * 1000, 408),
    "nothing": (b"", None),
    "empty lines": (b"\r\n" * 2500, None),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_comes_byte_by_byte_does_not_hold_its_connection(url: str, name: str) -> None:
    data, status = SLOW[name]
    with connect(url) as caller:
        caller.settimeout(0.01)
        received, closed = b"", False
        for index in range(3000):  # of a hundredth of a second
            with contextlib.suppress(ConnectionError):
                caller.send(data[index : index + 1])
            with contextlib.suppress(TimeoutError):
                try:
                    piece = caller.recv(65536)
                except ConnectionError:
                    piece = b""
                received, closed = received + piece, not piece
            if closed:
                break
        assert closed, "it is still open"
        assert [reply.status for reply in replies(received)] == ([] if status is None else [status])
    answered(url)


# -- what is answered, and how


def test_a_body_too_large_is_refused_before_it_is_asked_for(url: str) -> None:
    (reply,) = ask(url, POST + b"Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n")
    assert (reply.status, reply.interim) == (413, [])


def test_what_follows_a_good_request_and_is_none_gets_an_answer(url: str) -> None:
    good = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    assert [reply.status for reply in ask(url, good + b"nonsense\r\n\r\n")] == [200, 400]


def test_a_body_without_its_length_gets_an_answer(url: str) -> None:
    (reply,) = ask(url, POST + b"\r\n" + BODY)
    assert (reply.status, reply.headers["connection"]) == (411, "close") and b"Content-Length" in reply.body
    assert httpx.post(url + "/cache/clear").status_code == 200
    (cleared,) = ask(url, b"POST /cache/clear HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert cleared.status == 200  # needs none: `curl -X POST` sends no length


def test_codings_and_hosts_that_another_server_may_read_differently_are_refused(url: str) -> None:
    coded = CHUNKED.replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n"
    assert [reply.status for reply in ask(url, coded)] == [501]
    hosts = POST + b"Host: evil.example\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    assert [reply.status for reply in ask(url, hosts)] == [400]


def test_refused_heads_take_no_bodies(url: str) -> None:
    for head, status in ((f"POST {PATH} HTTP/1.1\r\nHost: evil.example\r\n", 403), ("POST /nothing HTTP/1.1\r\nHost: x\r\n", 404),
                         (f"PUT {PATH} HTTP/1.1\r\nHost: x\r\n", 405),
                         (f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n", 415)):  # fmt: skip
        (reply,) = ask(url, head.encode() + b"Content-Length: 9000000\r\n\r\n" + b"x" * 200_000)
        assert (reply.status, reply.headers["connection"]) == (status, "close")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("flags", [["--http2"], ["--http1.0"], ["--http1.1"], ["-H", "Transfer-Encoding: chunked"],
                                   ["--http2", "-H", "Transfer-Encoding: chunked"], ["-H", "Expect: 100-continue"]])  # fmt: skip
def test_curl_is_answered(url: str, flags: list[str]) -> None:
    done = subprocess.run(
        ["curl", "-sS", "-m", "30", "-w", " %{http_code}", *flags, "-H", "Content-Type: application/json", "-d", BODY.decode(),
         url + PATH], capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.endswith(" 200") and '"choices"' in done.stdout, done.stdout


# -- connections


def test_idle_connections_give_way_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.edge.server.MIN_CLOSED", 1)
    with serving_quickly(monkeypatch, max_connections=20) as url, contextlib.ExitStack() as stack:
        monkeypatch.setattr("tonle.edge.server.SWEEP_S", 60.0)
        callers = [stack.enter_context(connect(url)) for _ in range(10)]
        for caller in callers:
            caller.sendall(b"GET /health HTTP/1.1\r\n")  # a head that does not end
        silent = [stack.enter_context(connect(url)) for _ in range(200)]
        assert silent[0].recv(1) == b""  # the one of longest standing
        for _ in range(30):
            answered(url)
        callers += [stack.enter_context(connect(url)) for _ in range(200)]
        for caller in callers[10:]:
            with contextlib.suppress(ConnectionError):
                caller.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(30):
            answered(url)


def test_where_all_are_busy_one_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    front = FakeFront()
    with serving(front, max_connections=5) as url, contextlib.ExitStack() as stack:
        half = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY[:-1]
        callers = [stack.enter_context(connect(url)) for _ in range(5)]
        for caller in callers:
            caller.sendall(half)
        until(lambda: [reply.status for reply in ask(url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")] == [503],
              "it is let in")  # fmt: skip
        for caller in callers:
            caller.sendall(BODY[-1:])
            assert caller.recv(65536).startswith(b"HTTP/1.1 200")
        answered(url)
