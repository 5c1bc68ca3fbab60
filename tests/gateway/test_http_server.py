"""The gateway behind its HTTP server: order, versions, pressure, connections used again. For HTTP itself: `tests/edge`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.gateway.running_gateway import KEY, RunningGateway, Upstream, run, running_gateway, until


async def raw(place: RunningGateway, data: bytes, *, until: bytes = b"") -> bytes:
    """Send bytes, read until `until` or the end."""
    host, port = place.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    received = b""
    async with asyncio.timeout(120):
        while not until or until not in received:
            piece = await reader.read(65536)
            if not piece:
                break
            received += piece
    writer.close()
    return received


def request(body: bytes = b'{"model":"m"}', *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST /v1/chat/completions HTTP/{version}", "Host: x", f"Authorization: Bearer {KEY}",
             "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


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
            for _ in range(6000):
                if place.gateway.server.num_answered or not place.gateway.server.connections:
                    break
                await asyncio.sleep(0.02)
            writer.close()
            del reader
        (record,) = place.records()
        assert (record["status"], record["error"]["message"]) == ("cancelled", "the caller stopped reading")

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
