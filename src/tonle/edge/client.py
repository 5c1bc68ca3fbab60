"""The client: keep-alive connections to one server, answers handed on straight from the socket.

Does: connect (plain or TLS), send ready-made requests, parse answers with llhttp, pool connections, time out, name
failures. Does not: follow redirects, decompress, retry an answer that has begun, or know of JSON or event streams.

All pieces that one read brought are handed on as one: many small chunks of a fast server cost one write, and a slow
server's chunks are not delayed. No task is woken per chunk.

Why not httpx or aiohttp: they take several times the CPU per streamed chunk, which a gateway pays for every token, and a
benchmark takes from the server it measures on the same machine (docs/benchmarking.md).
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from tonle.errors import ConfigError
from tonle.protocol.answers import Answer

CONNECT_TIMEOUT_S = 5.0


class Sink(Protocol):
    """Takes an answer as it arrives. What it raises fails the exchange."""

    def attach(self, press: Callable[[bool], None]) -> None:
        """Before all: `press(True)` asks the sender to wait, `press(False)` to go on."""
        ...

    def know(self, answer: Answer) -> None:
        """Optional, between `attach` and the first `data`, by a sender in this process: what the bytes say.

        The sender keeps filling `answer` (text, usage, finish reasons, `first_s`, `complete`, an error) until `send`
        returns or raises, and sends the bytes as usual. The sink then need not parse them.
        """
        ...

    def head(self, status: int, headers: dict[str, str]) -> None: ...
    def data(self, piece: bytes) -> None: ...


class UpstreamError(Exception):
    """No full answer. `began` tells whether a part of it was handed on; `sent`, whether the server may have acted."""

    def __init__(self, kind: str, detail: str = "", *, began: bool = False, sent: bool = True) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.began = began
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `prefix` is what stands before `/v1`."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""

    @classmethod
    def parse(cls, url: str, *, scheme: str | None = None) -> Address:
        """Read `http://host:8000`, with or without `/v1`. `scheme` is for a URL that has none; None: it must have one."""
        try:
            parts = urlsplit(url if scheme is None or "://" in url else f"{scheme}://{url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a valid URL: {error}", param="url") from None
        if "@" in parts.netloc:
            raise ConfigError("a URL cannot have a user name or password in it; give an API key instead", param="url")
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


class ClientConnection(asyncio.Protocol):
    """One socket; carries one request at a time. The `on_…` methods are httptools' callbacks."""

    def __init__(self) -> None:
        self.reusable = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._finished: asyncio.Future[None] | None = None
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._status = 0
        self._framed = False  # the answer says where it ends
        self._complete = False
        self._keep_alive = False
        self._began = False
        self._paused = False
        self._touched_s = 0.0
        self._silence_s = 0.0  # longest allowed
        self._timer: asyncio.TimerHandle | None = None

    async def exchange(self, request: bytes, sink: Sink, *, first_s: float, silence_s: float) -> None:
        """Send, and hand the answer to `sink`. `first_s` bounds the wait for its first byte, `silence_s` later ones."""
        assert self._transport is not None, "used before it was connected"
        if self._transport.is_closing():
            raise UpstreamError("connection closed", "before the request was sent", sent=False)
        self.reusable = self._began = self._complete = self._framed = False
        self._headers, self._status, self._sink = {}, 0, sink
        self._silence_s = silence_s
        finished = self._finished = self._loop.create_future()

        def press(full: bool) -> None:
            if self._finished is finished:  # later, the connection is idle or carries another answer
                self._press(full)

        sink.attach(press)
        self._touched_s = time.monotonic()
        self._timer = self._loop.call_later(first_s, self._time_out, first_s)
        self._transport.write(request)
        try:
            await finished
        finally:
            self._timer.cancel()
            self._finished = self._sink = None
            self._press(False)

    def _press(self, full: bool) -> None:
        """The receiver of the answer is full, or has room again."""
        if self._transport is None or self._transport.is_closing() or full == self._paused:
            return
        self._paused = full
        self._touched_s = time.monotonic()
        if full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._touched_s = time.monotonic()
        try:
            self._parser.feed_data(data)
            self._hand_on()
        except httptools.HttpParserError as error:
            self._fail(UpstreamError("unreadable answer", f"not HTTP/1.1 ({error})", began=self._began))
            self.close()
        except Exception as error:  # what took the answer failed: nothing is left to do with the rest
            self._fail(error)
            self.close()
            return
        if self._complete:
            self.reusable = self._keep_alive
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._status == 200 and not self._framed and self._finished is not None:
            self._finish()
            return
        detail = str(error) if error is not None else "by the server"
        detail += "" if self._began else ", before it answered"
        self._fail(UpstreamError("connection closed", detail, began=self._began))

    # -- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status < 200:  # "100 Continue" and the like: the answer is still to come
            return
        self._framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        self._began = True
        if self._sink is not None:
            self._sink.head(self._status, self._headers)

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._status < 200:
            self._headers = {}
            return
        self._complete = True
        self._keep_alive = self._parser.should_keep_alive()  # only now: the parser forgets it with the next byte

    def _hand_on(self) -> None:
        if not self._pieces:
            return
        pieces, self._pieces = self._pieces, []
        if self._sink is not None:
            self._sink.data(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _time_out(self, waited_s: float) -> None:
        if self._finished is None:
            return
        left_s = self._touched_s + self._silence_s - time.monotonic()
        if self._began and (left_s > 0 or self._paused):  # bytes came since, or it is we who do not read
            again_s = self._silence_s if self._paused else left_s
            self._timer = self._loop.call_later(again_s, self._time_out, self._silence_s)
            return
        self._fail(UpstreamError("timeout", f"nothing came for {waited_s:g} s", began=self._began))
        self.close()

    def _finish(self) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def _fail(self, failure: Exception) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(failure)


class HttpClient:
    """Owns the connections to one server; as many as there are requests at once."""

    def __init__(
        self,
        address: Address,
        *,
        api_key: str | None = None,
        verify_tls: bool = True,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError(
                "the API key contains a line break or another character that HTTP cannot send", param="api_key"
            )
        self.address = address
        self._connect_timeout_s = connect_timeout_s
        self.reconnects = 0  # requests sent again because the server had closed their idle connection
        self._tls = _tls_context(verify=verify_tls) if address.tls else None
        self._idle: list[ClientConnection] = []
        self._common = f"Host: {address.netloc}\r\nUser-Agent: tonle\r\nAccept-Encoding: identity\r\n"
        if api_key:
            self._common += f"Authorization: Bearer {api_key}\r\n"

    def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        """The bytes of a request. `path` starts after the address's prefix."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"{method} {self.address.prefix}{path} HTTP/1.1\r\n{self._common}{lines}"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode("latin-1", "replace") + b"\r\n" + body

    async def send(self, request: bytes, sink: Sink, *, first_s: float, silence_s: float) -> None:
        """Send the bytes of a request and hand the answer to `sink`, of any status. Raises `UpstreamError`."""
        if (idle := self._take_idle()) is not None:
            try:
                await idle.exchange(request, sink, first_s=first_s, silence_s=silence_s)
                return
            except UpstreamError as error:
                # The server closed the idle connection as the request was sent: once more, on a new one.
                if error.began or error.kind != "connection closed":
                    raise
                self.reconnects += 1
            finally:
                self.put(idle)
        connection = await self.connect()
        try:
            await connection.exchange(request, sink, first_s=first_s, silence_s=silence_s)
        finally:
            self.put(connection)

    async def prepare(self, num_connections: int) -> None:
        """Have so many idle connections, so that requests need not connect. Raises `UpstreamError`."""
        self._idle = [connection for connection in self._idle if connection.reusable]
        while len(self._idle) < num_connections:
            connection = await self.connect()
            connection.reusable = True
            self._idle.append(connection)

    async def take(self) -> ClientConnection:
        """A connection for one exchange; give it back with `put`. Raises `UpstreamError`."""
        return self._take_idle() or await self.connect()

    def _take_idle(self) -> ClientConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    def put(self, connection: ClientConnection) -> None:
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    ClientConnection, self.address.host, self.address.port, ssl=self._tls
                )
        except TimeoutError:
            raise UpstreamError("connection timeout", self.address.netloc, sent=False) from None
        except (socket.gaierror, UnicodeError) as error:  # UnicodeError: cannot be a host name
            raise UpstreamError("host not found", f"{self.address.host} ({error})", sent=False) from None
        except ssl.SSLError as error:
            raise UpstreamError("TLS error", str(error), sent=False) from None
        except OSError as error:
            if _is_refusal(error):
                raise UpstreamError("connection refused", self.address.netloc, sent=False) from None
            raise UpstreamError("connection failed", str(error), sent=False) from None
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _is_refusal(error: OSError) -> bool:
    """Also of a host with several addresses, such as `localhost`: that error has no number, only the text of each."""
    numbers = [str(error.errno)] if error.errno else re.findall(r"\[Errno (\d+)\]", str(error))
    return {*numbers} == {str(errno.ECONNREFUSED)}


def _tls_context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
