"""A small HTTP/1.1 client for measuring: keep-alive connections, one timestamp per network read, nothing buffered.

Does: connect (plain or TLS), send ready-made requests, parse answers with httptools, pool connections, name failures.
Does not: follow redirects, use proxies, decompress or retry answers; know of JSON or event streams.

Why not httpx or aiohttp: the client shares a machine with the server it measures, and they take several times the CPU
per streamed chunk (see the benchmarking page). Body bytes are handed on straight from the socket callback: no task is
woken per chunk.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

import httptools

from tonle.errors import ConfigError

OnData = Callable[[bytes, float], None]  # body bytes, and the moment they arrived

TRUNCATED = "truncated stream"
UNREACHABLE = ("connection refused", "host not found", "connection failed", "TLS error")


class RequestError(Exception):
    """One request got no full answer. Becomes a row of the report and never leaves the bench."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


class NeverAnsweredError(RequestError):
    """The connection was closed before the first byte of an answer."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `prefix` is what stands before `/v1`."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read `http://host:8000`, with or without `/v1`, or just `host:8000`."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"url {url!r} has no valid port", param="url") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url {url!r} must look like http://127.0.0.1:8000", param="url")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.netloc}{self.prefix}"


class Reply:
    """Owns one answer: status and body. The body stays empty where `on_data` took it."""

    __slots__ = ("_parts", "content_type", "framed", "status")

    def __init__(self) -> None:
        self.status = 0  # 0 until the head is complete
        self.content_type = ""
        self.framed = False  # the head says where the body ends; otherwise the end of the connection does
        self._parts: list[bytes] = []

    def add(self, data: bytes) -> None:
        self._parts.append(data)

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)


class Connection(asyncio.Protocol):
    """Owns one socket; carries one request at a time. The `on_…` methods are httptools' callbacks."""

    def __init__(self) -> None:
        self.reusable = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply = Reply()
        self._on_data: OnData | None = None
        self._finished: asyncio.Future[Reply] | None = None
        self._touched = False  # a byte of the present answer has arrived
        self._now_s = 0.0

    async def exchange(self, request: bytes, on_data: OnData | None) -> Reply:
        """Send and await the answer. A 200's body goes to `on_data` as it arrives, if given; else into the reply."""
        assert self._transport is not None, "used before it was connected"
        if self._transport.is_closing():
            raise NeverAnsweredError("connection closed", "by the server, before the request was sent")
        self.reusable = self._touched = False
        self._reply = Reply()
        self._on_data = on_data
        self._finished = self._loop.create_future()
        self._transport.write(request)
        try:
            return await self._finished
        finally:
            self._finished = None

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def data_received(self, data: bytes) -> None:
        self._now_s = perf_counter()
        self._touched = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(RequestError("unreadable answer", f"not HTTP/1.1 ({error})"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        detail = str(error) if error is not None else "by the server"
        if not self._touched:
            self._fail(NeverAnsweredError("connection closed", f"{detail}, before it answered"))
        elif self._reply.status == 200 and not self._reply.framed:
            self._finish()
        else:
            self._fail(RequestError(TRUNCATED, f"connection closed {detail}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"content-type":
            self._reply.content_type = value.decode("latin-1")
        elif lowered in (b"content-length", b"transfer-encoding"):
            self._reply.framed = True

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._on_data is not None and self._reply.status == 200:
            self._on_data(data, self._now_s)
        else:
            self._reply.add(data)

    def on_message_complete(self) -> None:
        if self._reply.status < 200:  # "100 Continue" and the like: the answer is still to come
            self._reply = Reply()
            return
        self.reusable = self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(self._reply)

    def _fail(self, failure: RequestError) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(failure)


class HttpClient:
    """Owns the connections to one server; as many as there are requests at once."""

    def __init__(self, address: Address, *, api_key: str | None = None, verify_tls: bool = True) -> None:
        self.address = address
        self.reconnects = 0  # requests sent again because the idle connection they used was already closed
        self._tls = _tls_context(verify=verify_tls) if address.tls else None
        self._idle: list[Connection] = []
        self._common_head = f"Host: {address.netloc}\r\nUser-Agent: tonle-bench\r\nAccept-Encoding: identity\r\n"
        if api_key:
            self._common_head += f"Authorization: Bearer {api_key}\r\n"

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request. `path` starts after the address's prefix."""
        head = f"{method} {self.address.prefix}{path} HTTP/1.1\r\n{self._common_head}"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode("latin-1") + b"\r\n" + body

    async def send(self, request: bytes, *, timeout_s: float, on_data: OnData | None = None) -> Reply:
        """Send a request made by `request`; raise `RequestError` unless a whole answer, of any status, came back."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._send(request, on_data)
        except TimeoutError:
            raise RequestError("timeout", f"no full answer in {timeout_s:g} s") from None

    async def _send(self, request: bytes, on_data: OnData | None) -> Reply:
        idle = self._take_idle()
        if idle is not None:
            try:
                return await self._send_over(idle, request, on_data)
            except NeverAnsweredError:  # the server gave the idle connection up as we wrote: try a fresh one, once
                self.reconnects += 1
        return await self._send_over(await self._connect(), request, on_data)

    async def _send_over(self, connection: Connection, request: bytes, on_data: OnData | None) -> Reply:
        try:
            return await connection.exchange(request, on_data)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def prepare(self, num_connections: int, *, timeout_s: float) -> None:
        """Have so many idle connections, so that requests do not pay for connecting. Failing is left to them."""
        self._idle = [connection for connection in self._idle if connection.reusable]
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._idle) < num_connections:
                    connection = await self._connect()
                    connection.reusable = True
                    self._idle.append(connection)
        except (RequestError, TimeoutError):
            return

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                Connection, self.address.host, self.address.port, ssl=self._tls
            )
        except ConnectionRefusedError:
            raise RequestError("connection refused", str(self.address)) from None
        except socket.gaierror as error:
            raise RequestError("host not found", f"{self.address.host} ({error})") from None
        except ssl.SSLError as error:
            raise RequestError("TLS error", str(error)) from None
        except OSError as error:
            raise RequestError("connection failed", str(error)) from None
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _tls_context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
