"""One HTTP request and the reply to it, over plain ASGI.

Does: read the body within limits, send a reply whole or in pieces, notice that the caller hung up or stopped reading.
Does not: know what is asked or answered.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from tonle.engine.request import Usage
from tonle.errors import TooLarge
from tonle.replica.options import MIB, ReplicaOptions

JSON = "application/json"
SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")

# After a body that is too large we read on for a while: closing at once resets the connection, and a caller who is
# still sending would see that instead of our answer.
DISCARD_BYTES = 64 * MIB
DISCARD_S = 5.0


class CallerGone(Exception):  # noqa: N818 - nobody's error; it only ends the work
    """There is nobody left to answer."""


class Exchange:
    """Owns the connection's receive and send for the length of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, options: ReplicaOptions, *, id_prefix: str) -> None:
        self.scope = scope
        self.started_s = time.monotonic()
        self.status = 0  # 0 until the reply begins
        self.streaming = False
        self.usage: Usage | None = None  # of the answer, for the access log
        self._receive = receive
        self._send = send
        self._options = options
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._close = False  # end the connection with this reply
        theirs = self.header("x-request-id")
        sane = SANE_ID.fullmatch(theirs) is not None
        # In the reply's body the id always has OpenAI's prefix; in the header a caller finds what they sent.
        self.answer_id = f"{id_prefix}-{theirs if sane else secrets.token_hex(12)}"
        self.request_id = theirs if sane else self.answer_id

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """Safe to log and to send back: no control characters."""
        return str(self.scope["path"]).encode("unicode_escape").decode()[:200]

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def header(self, name: str) -> str:
        """Empty if absent."""
        return self._headers.get(name.encode(), b"").decode("latin-1")

    @property
    def salt(self) -> bytes:
        """Requests with different salts share no cached prefix. A gateway in this process sets it in the scope."""
        salt: bytes = self.scope.get("tonle.salt", b"")
        if not salt and self._options.trust_salt:
            salt = self.header("x-tonle-salt").encode("latin-1")
        return salt

    # -- reading

    async def body(self) -> bytes:
        """Raises `TooLarge`, `CallerGone`."""
        limit = self._options.max_body_bytes
        declared = self.header("content-length")
        if declared.isdecimal() and int(declared) > limit:
            await self._refuse_body(int(declared))
        pieces: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self._receive_body()
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > limit:
                pieces.clear()
                await self._refuse_body(size)
            more = message.get("more_body", False)
        return b"".join(pieces)

    async def _receive_body(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise CallerGone("hung up before the whole request was here")
        return message

    async def _refuse_body(self, size: int) -> None:
        self._close = True
        if self.header("expect").lower() != "100-continue":  # who asks before sending has nothing under way
            with suppress(TimeoutError):
                async with asyncio.timeout(DISCARD_S):
                    await self._discard()
        limit = self._options.max_body_bytes
        raise TooLarge(f"the request body has at least {size} bytes; this server takes at most {limit}")

    async def _discard(self) -> None:
        left, more = DISCARD_BYTES, True
        while more and left > 0:
            message = await self._receive_body()
            left -= len(message.get("body", b""))
            more = message.get("more_body", False)

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; stop it and raise `CallerGone` as soon as the caller hangs up. Only once the body is read."""
        task = asyncio.create_task(work)
        hangup = asyncio.create_task(self._hangup())
        try:
            await asyncio.wait({task, hangup}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise CallerGone("hung up")
            task.result()
        finally:
            hangup.cancel()
            if task.cancel():
                await asyncio.wait({task})  # what it holds is free when we return

    async def _hangup(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # -- writing

    async def reply(
        self, body: bytes, *, status: int = 200, content_type: str = JSON, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        own = [("content-length", str(len(body))), ("x-process-time", f"{self.elapsed_s:.6f}")]
        await self._start(status, content_type, (*own, *headers))
        await self._write({"type": "http.response.body", "body": body})

    async def start_stream(self, content_type: str, headers: Iterable[tuple[str, str]] = ()) -> None:
        # Proxies that buffer would hold the first tokens back.
        own = [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
        await self._start(200, content_type, (*own, *headers))
        self.streaming = True

    async def write(self, piece: bytes, *, last: bool = False) -> None:
        """Raises `CallerGone` if the caller has not read anything for too long."""
        await self._write({"type": "http.response.body", "body": piece, "more_body": not last})

    async def _start(self, status: int, content_type: str, headers: Iterable[tuple[str, str]]) -> None:
        self.status = status
        lines = [("content-type", content_type), ("x-request-id", self.request_id), *headers]
        if self._close:
            lines.append(("connection", "close"))
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines]
        await self._write({"type": "http.response.start", "status": status, "headers": raw})

    async def _write(self, message: Message) -> None:
        # The server below suspends us only while its buffer for this connection is full.
        try:
            async with asyncio.timeout(self._options.write_timeout_s):
                await self._send(message)
        except TimeoutError:
            raise CallerGone(f"read nothing for {self._options.write_timeout_s:g} s") from None
