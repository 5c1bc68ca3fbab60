"""The HTTP client against servers that do it right, and servers that do not."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench.scripted import STREAM_HEAD, Behaviour, Cut, ScriptedServer, Step, frame, json_reply, serving
from tonle.edge.buffered_reply import BufferedReply, fetch
from tonle.edge.client import Address, HttpClient, UpstreamError
from tonle.edge.streamed_reply import stream
from tonle.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000)),
        ("http://127.0.0.1:8000/", Address("127.0.0.1", 8000)),
        ("http://127.0.0.1:8000/v1", Address("127.0.0.1", 8000)),
        ("http://127.0.0.1:8000/v1/", Address("127.0.0.1", 8000)),
        ("http://models.example/serve/v1", Address("models.example", 80, prefix="/serve")),
        ("https://models.example", Address("models.example", 443, tls=True)),
        ("http://[::1]:8000", Address("::1", 8000)),
    ],
)
def test_addresses(url: str, expected: Address) -> None:
    assert Address.parse(url) == expected


def test_an_address_reads_back_without_v1() -> None:
    assert str(Address.parse("https://[::1]:8443/x/v1")) == "https://[::1]:8443/x"
    assert str(Address.parse("http://a:80")) == "http://a"


@pytest.mark.parametrize(
    "url", ["ftp://a", "localhost:9000", "http://", "http://a:port", "http://a:99999", "http://[::1"]
)
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Address.parse(url)


def test_a_scheme_may_be_assumed() -> None:
    assert Address.parse("localhost:9000/v1", scheme="http") == Address("localhost", 9000)
    assert Address.parse("https://a", scheme="http") == Address("a", 443, tls=True)


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse("http://me:secret@models.example")
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("key", ["sk-1\n", "sk-1\r\nX-Admin: 1", "ключ"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HttpClient(Address("a", 80), api_key=key)
    assert key not in caught.value.message


def with_client(server: ScriptedServer, work: Any, **options: Any) -> Any:
    async def run() -> Any:
        client = HttpClient(Address.parse(server.url), **options)
        try:
            return await work(client)
        finally:
            client.close()

    return asyncio.run(run())


def get(
    client: HttpClient, path: str = "/v1/completions", timeout_s: float = 10.0
) -> Coroutine[Any, Any, BufferedReply]:
    return fetch(client, client.request("GET", path, b"", {}), timeout_s=timeout_s)


def scripted(*steps: Step, **behaviour: Any) -> Behaviour:
    return Behaviour(script=lambda asked: steps, **behaviour)


def test_connections_are_reused_and_grow_with_need() -> None:
    async def work(client: HttpClient) -> None:
        for _ in range(5):
            await get(client)
        await asyncio.gather(*(get(client) for _ in range(3)))
        for _ in range(5):
            await get(client)

    with serving(scripted(0.01, json_reply(200, {}))) as server:
        with_client(server, work)
        assert server.num_connections == 3
        assert len(server.asked) == 13


def test_prepare_opens_connections_ahead() -> None:
    async def work(client: HttpClient) -> None:
        await client.prepare(4)
        await asyncio.gather(*(get(client) for _ in range(4)))

    with serving(scripted(json_reply(200, {}))) as server:
        with_client(server, work)
        assert server.num_connections == 4


def test_a_request_says_who_it_is_for() -> None:
    async def work(client: HttpClient) -> BufferedReply:
        request = client.request("POST", "/v1/completions", b'{"a":1}', {"X-More": "1"})
        return await fetch(client, request, timeout_s=60)

    with serving(scripted(json_reply(418, {"x": "y"}))) as server:
        reply = with_client(server, work, api_key="k")
        assert (reply.status, reply.body) == (418, b'{"x": "y"}')
        asked = server.asked[0]
        assert asked.headers["host"] == f"127.0.0.1:{server.port}"
        assert asked.headers["authorization"] == "Bearer k"
        assert asked.headers["x-more"] == "1"
        assert asked.body == {"a": 1}


def test_a_body_that_ends_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    with serving(scripted(head, b"{}", Cut())) as server:
        assert with_client(server, get).body == b"{}"


def test_interim_answers_are_skipped() -> None:
    with serving(scripted(b"HTTP/1.1 100 Continue\r\n\r\n", json_reply(200, {"a": 1}))) as server:
        assert with_client(server, get).body == b'{"a": 1}'


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([Cut()], "connection closed"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", Cut()], "connection closed, begun"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", Cut()], "connection closed, begun"),
        ([b"SSH-2.0-OpenSSH_9.9\r\n", 5.0], "unreadable answer"),
        ([5.0], "timeout"),
    ],
)
def test_failures_have_names(steps: list[Step], kind: str) -> None:
    with serving(scripted(*steps)) as server, pytest.raises(UpstreamError) as caught:
        with_client(server, lambda client: get(client, timeout_s=0.5 if kind == "timeout" else 30))
    assert caught.value.kind + ", begun" * caught.value.began == kind


def test_no_server_there() -> None:
    with serving() as server:
        place = f"127.0.0.1:{server.port}"
    server.behaviour = Behaviour()
    with pytest.raises(UpstreamError) as caught:
        with_client(server, get)
    assert caught.value.kind == "connection refused"
    assert place in str(caught.value) and not caught.value.sent


def test_no_server_at_any_address_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` often has two; asyncio then raises an error without a number."""

    async def work() -> None:
        loop = asyncio.get_running_loop()

        async def both(*_: Any, **__: Any) -> list[Any]:
            kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
            return [(*kind, ("127.0.0.1", 1)), (*kind, ("127.0.0.2", 1))]

        monkeypatch.setattr(loop, "getaddrinfo", both)
        await HttpClient(Address("several.example", 1)).connect()

    with pytest.raises(UpstreamError) as caught:
        asyncio.run(work())
    assert str(caught.value) == "connection refused: several.example:1" and not caught.value.sent


def test_a_name_that_cannot_be_a_host() -> None:
    with pytest.raises(UpstreamError) as caught:
        asyncio.run(HttpClient(Address.parse("http://a..b")).connect())
    assert caught.value.kind == "host not found" and not caught.value.sent


def test_a_stream_is_read_as_it_arrives() -> None:
    """The server sends its second piece after it was asked twice: the first one was handed out before the end."""
    asked_again = threading.Event()

    def script(asked: Any) -> Iterator[Step]:
        if asked.path == "/completions":
            asked_again.set()
            yield json_reply(200, {})
            return
        yield STREAM_HEAD
        yield frame(b"one")
        while not asked_again.is_set():
            yield 0.01
        yield frame(b"two") + b"0\r\n\r\n"

    async def work(client: HttpClient) -> list[bytes]:
        async with stream(client, client.request("GET", "/v1/completions", b"", {}), first_s=30, silence_s=30) as reply:
            assert (reply.status, reply.content_type) == (200, "text/event-stream")
            pieces = [await anext(reply)]
            await get(client, "/completions")
            return [*pieces, await reply.read()]

    with serving(Behaviour(script=script)) as server:
        assert with_client(server, work) == [b"one", b"two"]


@pytest.mark.parametrize("how", ["left", "cancelled", "before the head"])
def test_leaving_a_stream_hangs_up(how: str) -> None:
    async def read(client: HttpClient, begun: asyncio.Event) -> None:
        request = client.request("GET", "/v1/completions", b"", {})
        async with stream(client, request, first_s=math.inf, silence_s=math.inf) as reply:
            await anext(reply)
            begun.set()
            if how == "cancelled":
                await anext(reply)

    async def work() -> None:
        hung_up, asked, begun = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            if how != "before the head":
                writer.write(STREAM_HEAD + frame(b"one"))
            with contextlib.suppress(ConnectionError):
                await reader.read()
            hung_up.set()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(60):
            client = HttpClient(Address("127.0.0.1", server.sockets[0].getsockname()[1]))
            reading = asyncio.create_task(read(client, begun))
            await (asked if how == "before the head" else begun).wait()
            if how != "left":
                reading.cancel()
            await asyncio.wait([reading])
            await hung_up.wait()
            assert reading.cancelled() == (how != "left")
            client.close()

    asyncio.run(work())


def test_a_stream_that_breaks_off_gives_what_came_first() -> None:
    async def work(client: HttpClient) -> None:
        async with stream(client, client.request("GET", "/v1/completions", b"", {}), first_s=30, silence_s=30) as reply:
            assert await anext(reply) == b"one"
            with pytest.raises(UpstreamError, match="connection closed"):
                await anext(reply)

    with serving(scripted(STREAM_HEAD, frame(b"one"), Cut())) as server:
        with_client(server, work)


def test_an_idle_connection_the_server_closed_is_replaced_once() -> None:
    """The second request finds its connection cut without an answer; the third request's own new connection too."""

    def script(asked: Any) -> list[Step]:
        return [Cut()] if asked.number in (1, 3, 4) else [json_reply(200, {})]

    async def work(client: HttpClient) -> int:
        assert (await get(client)).status == 200
        assert (await get(client)).status == 200  # cut, then again on a fresh connection
        with pytest.raises(UpstreamError):
            await get(client)  # cut, then cut again
        return client.reconnects

    with serving(Behaviour(script=script)) as server:
        assert with_client(server, work) == 2


def test_a_timed_out_connection_is_not_used_again() -> None:
    def script(asked: Any) -> list[Step]:
        return [2.0, json_reply(200, {"late": True})] if asked.number == 0 else [json_reply(200, {"late": False})]

    async def work(client: HttpClient) -> BufferedReply:
        with pytest.raises(UpstreamError):
            await get(client, timeout_s=0.2)
        return await get(client)

    with serving(Behaviour(script=script)) as server:
        assert with_client(server, work).body == b'{"late": false}'
        assert server.num_connections == 2


@pytest.fixture
def certificate(tmp_path: Path) -> ssl.SSLContext:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is needed to make a certificate")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


def test_tls(certificate: ssl.SSLContext) -> None:
    with serving(scripted(json_reply(200, {"secret": 1})), tls=certificate) as server:
        assert with_client(server, get, verify_tls=False).body == b'{"secret": 1}'
        with pytest.raises(UpstreamError) as caught:
            with_client(server, get)
    assert caught.value.kind == "TLS error"
