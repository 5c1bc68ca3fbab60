"""The server under callers with bad manners, and the client under servers with worse."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.gateway.running_gateway import KEY, RunningGateway, Upstream, run, running_gateway, until
from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import Address, HttpClient, UpstreamError


async def raw(place: RunningGateway, data: bytes, *, until: bytes = b"") -> bytes:
    """Send bytes, read until `until` or the end."""
    host, port = place.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    received = b""
    async with asyncio.timeout(10):
        while not until or until not in received:
            piece = await reader.read(65536)
            if not piece:
                break
            received += piece
    writer.close()
    return received


def request(body: bytes = b'{"model":"m"}', *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST /v1/chat/completions HTTP/{version}", "Host: x", f"Authorization: Bearer {KEY}",
             f"Content-Length: {len(body)}", *headers]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"x" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /x HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    ],
)
def test_what_is_not_http_is_refused_and_closed(tmp_path: Path, data: bytes, status: bytes) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            assert (await raw(place, data)).startswith(b"HTTP/1.1 " + status)
            assert (await place.ask()).status_code == 200

    run(main())


def test_requests_sent_ahead_are_answered_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            burst = b"".join(
                request(b'{"model":"m","n":%d}' % index, f"X-Request-Id: id-{index}") for index in range(12)
            )
            close = request(b"{}", "Connection: close")
            replies = await raw(place, burst + close)
            ids = [line for line in replies.split(b"\r\n") if line.startswith(b"x-request-id: id-")]
            assert ids == [b"x-request-id: id-%d" % index for index in range(12)]
        assert len(place.records()) == 13

    run(main())


def test_http_1_0_ends_with_the_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            reply = await raw(place, request(b'{"model":"m","stream":true}', version="1.0"))
            assert b"transfer-encoding" not in reply and reply.endswith(b"data: [DONE]\n\n")

    run(main())


def test_expect_continue(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            reply = await raw(place, request(b'{"model":"m"}', "Expect: 100-continue", "Connection: close"))
            assert reply.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")

    run(main())


def test_a_slow_reader_slows_the_backend_and_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.words = [f"{index:06d}" + "x" * 4000 for index in range(1500)]  # 6 MB
        async with running_gateway(tmp_path, upstream) as place:
            body = {"model": "m", "stream": True, "messages": []}
            seen, headers = b"", {"authorization": f"Bearer {KEY}"}
            async with place.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
                (connection,) = [each for each in place.gateway.server.connections if not each.idle]
                await until(lambda: connection.full, "the backend was not slowed")
                async for piece in reply.aiter_raw():
                    seen += piece
            assert seen.endswith(b"data: [DONE]\n\n")
            assert all(f"{index:06d}x".encode() in seen for index in range(1500))

    run(main())


def test_a_caller_who_never_reads_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.edge.server.SWEEP_S", 0.05)

    async def main() -> None:
        upstream = Upstream("m")
        upstream.words = ["x" * 4000] * 3000
        async with running_gateway(tmp_path, upstream, write_timeout_s=0.2) as place:
            host, port = place.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.write(request(b'{"model":"m","stream":true}'))
            for _ in range(500):
                if place.gateway.server.num_answered or not place.gateway.server.connections:
                    break
                await asyncio.sleep(0.02)
            writer.close()
            del reader
        (record,) = place.records()
        assert (record["status"], record["error"]["message"]) == ("cancelled", "the caller stopped reading")

    run(main())


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "connection closed"),
        (b"garbage", "unreadable answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "connection closed"),
    ],
)
def test_answers_that_are_none(answer: bytes, kind: str) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = HttpClient(Address.parse(f"http://127.0.0.1:{port}/v1"))
        connection = await client.take()
        with pytest.raises(UpstreamError) as failure:
            await connection.exchange(client.request("GET", "/x", b"", {}), BufferedReply(), first_s=5, silence_s=5)
        assert failure.value.kind == kind
        server.close()

    run(main())


def test_an_answer_without_length_ends_with_the_connection() -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\nall of it")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client, answer = HttpClient(Address.parse(f"http://127.0.0.1:{port}")), BufferedReply()
        connection = await client.take()
        await connection.exchange(client.request("GET", "/x", b"", {}), answer, first_s=5, silence_s=5)
        assert (answer.status, answer.body) == (200, b"all of it")
        assert not connection.reusable
        server.close()

    run(main())


def test_connections_are_used_again(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream, cache=None) as place:
            for index in range(6):
                assert (await place.ask(stream=bool(index % 2))).status_code == 200
            assert len(upstream.server.connections) == 1
            assert len(place.gateway.server.connections) == 1

    run(main())
