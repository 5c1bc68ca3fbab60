"""The HTTP client against servers without measure, and what it does with a connection that was idle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from tests.gateway.running_gateway import run
from tonle.edge.buffered_reply import BufferedReply, fetch
from tonle.edge.client import Address, HttpClient, UpstreamError
from tonle.edge.listening import run as run_on_uvloop

ENOUGH = 32 * 1024**2  # bytes that a server without measure sends at most
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
LOOPS = pytest.mark.parametrize("runner", [asyncio.run, run_on_uvloop], ids=["asyncio", "uvloop"])


@contextlib.asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[HttpClient]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()

    found = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = HttpClient(Address("127.0.0.1", found.sockets[0].getsockname()[1]), idle_s=60)
    try:
        yield client
    finally:
        client.close()
        found.close()


def post(client: HttpClient) -> Awaitable[BufferedReply]:
    return fetch(client, client.request("POST", "/v1/completions", b"{}", {}), timeout_s=60)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + (await reader.readexactly(2) if head.startswith(b"POST") else b"")


def repeated(begin: bytes, piece: bytes) -> Iterator[bytes]:
    yield begin
    while True:
        yield piece * (65536 // len(piece))


OK_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@LOOPS
@pytest.mark.parametrize(
    ("begin", "piece", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Long: ", b"a", "as its head"),
        (b"HTTP/1.1 200 ", b"OK", "as its head"),
        (b"HTTP/1.1 200 OK\r\n", b"X: 1\r\n", "as its head"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "as its head"),
        (OK_CHUNKED + b"2;", b"e=1;", "between two pieces"),
        (OK_CHUNKED + b"2\r\n{}\r\n0\r\nX-Long: ", b"a", "between two pieces"),
    ],
    ids=["header", "reason", "headers", "interim", "chunk extension", "trailer"],
)
def test_a_head_without_end_is_given_up(begin: bytes, piece: bytes, said: str, runner: Callable[..., None]) -> None:
    """By what it sends, not by time: the server sends as fast as it can, and stops at `ENOUGH`."""
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        for part in repeated(begin, piece):
            writer.write(part)
            sent += len(part)
            if sent > ENOUGH:
                return
            await writer.drain()

    async def main() -> None:
        async with server(serve) as client:
            with pytest.raises(UpstreamError) as caught:
                await post(client)
            assert caught.value.kind == "answer too large" and said in str(caught.value)
            assert sent < ENOUGH

    run(main(), runner=runner)


@pytest.mark.parametrize("count", [200, 300])
def test_the_number_of_headers_is_bounded(count: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        lines = b"".join(b"X-%d: 1\r\n" % number for number in range(count))
        writer.write(b"HTTP/1.1 200 OK\r\n%bContent-Length: 2\r\n\r\n{}" % lines)
        await reader.read()

    async def main() -> None:
        async with server(serve) as client:
            if count == 200:
                assert (await post(client)).status == 200
                return
            with pytest.raises(UpstreamError, match="answer too large: more than 256 headers"):
                await post(client)

    run(main())


@LOOPS
def test_a_post_is_never_sent_twice(runner: Callable[..., None]) -> None:
    """The server reads the second request of a connection and closes it: it may have begun on it."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(OK)
        seen.append(await read_request(reader))

    async def main() -> None:
        async with server(serve) as client:
            assert (await post(client)).status == 200
            with pytest.raises(UpstreamError, match="connection closed"):
                await post(client)
            assert len(seen) == 2 and client.reconnects == 0
            assert (await fetch(client, client.request("GET", "/x", b"", {}), timeout_s=60)).status == 200
            assert (await fetch(client, client.request("GET", "/x", b"", {}), timeout_s=60)).status == 200
            assert client.reconnects == 1  # what only reads may be asked twice

    run(main(), runner=runner)


@LOOPS
def test_an_idle_connection_that_has_ended_is_noticed_before_a_request_is_sent(runner: Callable[..., None]) -> None:
    """Its end came in this very turn of the event loop, which has not read it yet."""
    listener = socket.create_server(("127.0.0.1", 0))
    close, closed = threading.Event(), threading.Event()

    def serve() -> None:
        for is_first in (True, False):
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(OK)
                if is_first:
                    close.wait(60)
            closed.set()

    async def main() -> None:
        client = HttpClient(Address("127.0.0.1", listener.getsockname()[1]))
        assert (await post(client)).status == 200
        close.set()
        assert closed.wait(60)  # holds up the event loop
        assert (await post(client)).status == 200
        client.close()

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    with listener:
        run(main(), runner=runner)
        serving.join(60)


@pytest.mark.parametrize(("header", "kept"), [(b"", True), (b"Keep-Alive: timeout=5\r\n", True),
                                              (b"Keep-Alive: timeout=1, max=100\r\n", False)])  # fmt: skip
def test_a_connection_is_not_used_for_longer_than_its_server_keeps_it(header: bytes, *, kept: bool) -> None:
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\n%bContent-Length: 2\r\n\r\n{}" % header)

    async def main() -> None:
        async with server(serve) as client:
            for _ in range(3):
                assert (await post(client)).status == 200
            assert num_connections == (1 if kept else 3)

    run(main())


def test_a_connection_that_was_idle_for_long_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    num_connections, skipped_s = 0, 0.0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while True:
            await read_request(reader)
            writer.write(OK)

    async def main() -> None:
        nonlocal skipped_s
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + skipped_s)
        async with server(serve) as client:
            for skip_s, expected in ((0, 1), (59, 1), (61, 2), (59, 2)):
                skipped_s += skip_s
                assert (await post(client)).status == 200
                assert num_connections == expected

    run(main())


@LOOPS
@pytest.mark.parametrize("at_once", [True, False])
def test_an_answer_to_no_request_is_not_taken_for_the_next_one(runner: Callable[..., None], *, at_once: bool) -> None:
    go_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        surplus = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nbefore"[: None if at_once else -1]
        writer.write(OK + surplus if at_once else OK)
        await writer.drain()
        if not at_once:
            await go_on.wait()
            writer.write(surplus)
            await writer.drain()
        await reader.read()

    async def main() -> None:
        async with server(serve) as client:
            assert (await post(client)).body == b"{}"
            idle = list(client._idle)
            go_on.set()
            for _ in range(120_000):
                if all(not each.reusable for each in idle):
                    break
                await asyncio.sleep(0.001)
            assert (await post(client)).body == b"{}"

    run(main(), runner=runner)
