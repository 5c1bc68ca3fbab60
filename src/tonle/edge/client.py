"""The client: keep-alive connections to one server, answers handed on straight from the socket.

Does: connect (plain or TLS), make and send requests, pool connections. Does not: follow redirects, decompress, send a
POST again unless told to, or know of JSON or event streams; an exchange is the work of its connection (`client_connection.py`).

Why not httpx or aiohttp: they take several times the CPU per streamed chunk, which a gateway pays for every token, and a
benchmark takes from the server it measures on the same machine (docs/benchmarking.md).
"""

from __future__ import annotations

import asyncio
import errno
import functools
import math
import os
import re
import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

from tonle.edge.client_connection import (
    CLOSED,
    CONNECT_TIMEOUT,
    IDLE_S,
    OUT_OF_SOCKETS,
    TIMEOUT,
    TOO_LARGE,
    ClientConnection,
    Sink,
    UpstreamError,
)
from tonle.errors import ConfigError

__all__ = [
    "OUT_OF_SOCKETS", "TIMEOUT", "TOO_LARGE", "Address", "ClientConnection", "HttpClient", "Sink", "UpstreamError",
]  # fmt: skip

CONNECT_TIMEOUT_S = 5.0
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)  # says nothing about the server


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


class HttpClient:
    """Owns the connections to one server; as many as there are requests at once."""

    def __init__(
        self,
        address: Address,
        *,
        api_key: str | None = None,
        verify_tls: bool = True,
        ca_file: str | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        idle_s: float = IDLE_S,
        resend: bool = False,
    ) -> None:
        """`ca_file`: the authorities to trust, not those of this machine. `resend`: send a POST again, too, if its idle
        connection ends without an answer. The server may then get it twice."""
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError(
                "the API key contains a line break or another character that HTTP cannot send", param="api_key"
            )
        self.address = address
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._resend = resend
        self.reconnects = 0  # requests sent again because the server had closed their idle connection
        self._tls = _tls_context(verify=verify_tls, ca_file=ca_file) if address.tls else None
        self._idle: deque[ClientConnection] = deque()  # used last at the end
        self._common = f"Host: {address.netloc}\r\nUser-Agent: tonle\r\nAccept-Encoding: identity\r\n"
        if api_key:
            self._common += f"Authorization: Bearer {api_key}\r\n"

    def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        """The bytes of a request. `path` starts after the address's prefix. A `content-type` in `headers` is in lower case."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"{method} {self.address.prefix}{path} HTTP/1.1\r\n{self._common}{lines}"
        if method in ("POST", "PATCH"):
            kind = "" if "content-type" in headers else "Content-Type: application/json\r\n"
            head += f"{kind}Content-Length: {len(body)}\r\n"
        return head.encode("latin-1", "replace") + b"\r\n" + body

    async def send(self, request: bytes, sink: Sink, *, first_s: float, silence_s: float) -> None:
        """Send the bytes of a request and hand the answer to `sink`, of any status. Raises `UpstreamError`.

        `first_s` bounds the wait for a connection and the first byte together, `silence_s` the wait for later bytes.
        """
        if (idle := self._take_idle()) is not None:
            try:
                await idle.exchange(request, sink, first_s=first_s, silence_s=silence_s)
                return
            except UpstreamError as error:
                # The server closed the idle connection as the request was sent, and may have begun on it.
                may_resend = self._resend or not error.sent or request.startswith(b"GET ")
                if error.kind != CLOSED or error.began or not may_resend:
                    raise
                self.reconnects += 1
            finally:
                self.put(idle)
        began_s = time.monotonic()
        connection = await self.connect(first_s)
        try:
            left_s = max(0.0, first_s - (time.monotonic() - began_s))
            await connection.exchange(request, sink, first_s=left_s, silence_s=silence_s)
        finally:
            self.put(connection)

    async def prepare(self, num_connections: int) -> None:
        """Have so many idle connections, so that requests need not connect. Raises `UpstreamError`."""
        self._idle = deque(connection for connection in self._idle if connection.reusable)
        while len(self._idle) < num_connections:
            connection = await self.connect()
            connection.reusable = True
            self._idle.append(connection)

    async def take(self) -> ClientConnection:
        """A connection for one exchange; give it back with `put`. Raises `UpstreamError`."""
        return self._take_idle() or await self.connect()

    def _take_idle(self) -> ClientConnection | None:
        """One that the server has not closed, as far as can be known."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_expired(time.monotonic()):
                connection.close()
                self.close()  # all others were idle for longer
            elif connection.reusable and connection.is_quiet:
                return connection
            else:
                connection.close()
        return None

    def put(self, connection: ClientConnection) -> None:
        if not connection.reusable:
            connection.close()
            return
        self._idle.append(connection)
        if len(self._idle) > 1 and self._idle[0].is_expired(time.monotonic()):
            self._idle.popleft().close()

    async def connect(self, within_s: float = math.inf) -> ClientConnection:
        """Raises `UpstreamError`."""
        loop, timeout_s = asyncio.get_running_loop(), min(within_s, self._connect_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    lambda: ClientConnection(self._idle_s), self.address.host, self.address.port, ssl=self._tls
                )
        except TimeoutError:
            if within_s < self._connect_timeout_s:
                raise UpstreamError(TIMEOUT, f"not connected within {within_s:g} s", sent=False) from None
            raise UpstreamError(CONNECT_TIMEOUT, self.address.netloc, sent=False) from None
        except (socket.gaierror, UnicodeError) as error:  # UnicodeError: cannot be a host name
            raise UpstreamError("host not found", f"{self.address.host} ({error})", sent=False) from None
        except ssl.SSLError as error:
            raise UpstreamError("TLS error", str(error), sent=False) from None
        except OSError as error:
            if error.errno in _OURS:
                raise UpstreamError(OUT_OF_SOCKETS, str(error), sent=False) from None
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


@functools.lru_cache(maxsize=4)
def _machine_tls(*_: str | None) -> ssl.SSLContext:
    """Trusts the authorities of this machine, from where OpenSSL looks for them. Reading them takes 40 ms: clients share it."""
    return ssl.create_default_context()


def _tls_context(*, verify: bool, ca_file: str | None) -> ssl.SSLContext:
    if verify and ca_file is None:
        return _machine_tls(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    context = ssl.create_default_context(cafile=ca_file)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
