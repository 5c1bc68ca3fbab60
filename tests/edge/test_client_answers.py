"""The HTTP client under servers with bad manners."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.running_gateway import run
from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import Address, HttpClient, UpstreamError


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "connection closed"),
        (b"garbage", "unreadable answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "connection closed"),
        (b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", "unreadable answer"),
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
