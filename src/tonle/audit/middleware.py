"""`AuditMiddleware`: the audit trail around any other server, as plain ASGI.

    vllm serve MODEL --middleware tonle.audit.AuditMiddleware          (configured by TONLE_AUDIT_DIR and its siblings)

Does: record every POST to a generating endpoint, also of callers without a key, since it is the outermost layer. Does
not: hold a reply back; each piece is passed on in the call that brings it, and read afterwards. Nor does it read a body
before the server does: of a request that is refused because of its head, nothing is read.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from tonle.audit.audit_options import AuditOptions, from_environ
from tonle.audit.body_summary import FIRST_BYTES, BodySummary
from tonle.audit.model_catalog import ModelCatalog
from tonle.audit.record import Record, Status, status_for
from tonle.audit.trail import AuditTrail
from tonle.audit.usage import ask_for_usage
from tonle.errors import CapacityError
from tonle.protocol.adapters import ADAPTER_HEADER, LOAD_PATH, UNLOAD_PATH, digest_in
from tonle.protocol.answers import EVENT_STREAM, Answer, Collector
from tonle.protocol.errors import error_reply

log = logging.getLogger("tonle.audit")

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_ID_CHARS = 128  # of a caller's X-Request-Id
MAX_LENGTH_DIGITS = 19
_WITH_USAGE_OPTION = ENDPOINTS[:2]
_ADAPTER_HEADER = ADAPTER_HEADER.encode()
_NOT_ADMITTED = (401, 403)  # what servers say to a caller they do not know


class AuditMiddleware:
    """One trail per middleware, begun with the first request (or the server's start) and ended with the server."""

    def __init__(self, app: App, options: AuditOptions | None = None, *, trail: AuditTrail | None = None) -> None:
        """`trail`: one that the caller starts and closes."""
        self.app = app
        self._is_mine = trail is None
        self.trail = trail or AuditTrail(options or from_environ(os.environ))
        self.catalog = ModelCatalog(app)
        self._started = not self._is_mine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._with_the_server(send))
            return
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in ENDPOINTS:
            await self.app(scope, receive, send)
            if scope["type"] == "http" and scope["path"] in (LOAD_PATH, UNLOAD_PATH):
                self.catalog.forget()
            return
        self._start()
        await Visit(self, scope, receive, send).run()

    def _with_the_server(self, send: Send) -> Send:
        async def watch(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._start()
            elif message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await asyncio.to_thread(self.close)
            await send(message)

        return watch

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self.trail.start()
            atexit.register(self.close)  # a server that runs no lifespan

    def close(self) -> None:
        if self._is_mine and self._started:
            self.trail.close()


class Visit:
    """One request through the middleware: what the server reads and sends goes through here."""

    def __init__(self, middleware: AuditMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        self._middleware = middleware
        self._trail = middleware.trail
        self._scope = {**scope, "headers": list(scope["headers"])}  # a list of our own, which may change
        self._receive = receive
        self._send = send
        self._headers = {name.lower(): value for name, value in scope["headers"]}
        self._record: Record | None = None
        self._collector: Collector | None = None
        self._swallow = False
        self._http_status: int | None = None
        self._is_done = False  # the last piece of the reply has gone
        self._is_gone = False  # the caller has
        self._unread: list[Message] = []  # of the request, for the server
        self._has_read = False  # the server has asked for the body
        self._num_received = 0  # bytes of it
        self._first = b""  # of a body that is not kept
        self._digest = hashlib.sha256()  # likewise
        self._is_encoded = False  # the reply is compressed
        self._adapter_digest: str | None = None  # as the reply tells

    async def run(self) -> None:
        if not await self._admit():
            return
        client = self._scope.get("client")
        self._record = record = self._trail.open(
            self._scope["path"],
            request_id=self._header(b"x-request-id")[:MAX_ID_CHARS] or None,
            client=str(client[0]) if client else None,
        )
        error: BaseException | None = None
        try:
            await self._middleware.app(self._scope, self._read, self._write)
            if self._is_done and self._http_status == 200:  # the caller has the whole answer and does not wait for this
                await self._middleware.catalog.learn(_model_asked(record.body), self._scope)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._close(record, error)

    def _header(self, name: bytes) -> str:
        return bytes(self._headers.get(name, b"")).decode("latin-1")

    async def _admit(self) -> bool:
        try:
            self._trail.admit()
        except CapacityError as error:
            reply = error_reply(error)
            headers = [(name.encode(), value.encode()) for name, value in reply.headers]
            headers.append((b"content-type", b"application/json"))
            await self._send({"type": "http.response.start", "status": reply.status, "headers": headers})
            await self._send({"type": "http.response.body", "body": msgspec.json.encode(reply.body)})
            return False
        return True

    # -- what the caller sends

    async def _read(self) -> Message:
        """The server's `receive`. With the first call, the whole body is read, so that a field can be added to it."""
        if not self._has_read:
            self._has_read = True
            await self._read_body()
        if self._unread:
            message = self._unread.pop(0)
        else:
            message = await self._receive()
            if message["type"] == "http.request":
                self._count(message)
        if message["type"] == "http.disconnect" and not self._is_done:
            self._is_gone = True
        return message

    async def _read_body(self) -> None:
        """Keep it for the server to read again. One that is too large is passed on as it comes, and only summarized."""
        assert self._record is not None
        limit = self._trail.options.max_body_bytes
        while self._num_received <= limit:
            message = await self._receive()
            self._unread.append(message)
            if message["type"] != "http.request":
                self._is_gone = True
                return
            self._num_received += len(message.get("body", b""))
            if not message.get("more_body", False) and self._num_received <= limit:
                body = self._record.body = b"".join([part.get("body", b"") for part in self._unread])
                self._ask_for_usage(body)
                return
        self._num_received = 0
        for message in self._unread:
            self._count(message)
        self._record.warnings = [f"the request has more than {limit} bytes: only its beginning is recorded"]

    def _count(self, message: Message) -> None:
        """A piece of a body that is not kept."""
        piece = message.get("body", b"")
        self._num_received += len(piece)
        self._digest.update(piece)
        if len(self._first) < FIRST_BYTES:
            self._first += piece[: FIRST_BYTES - len(self._first)]

    def _summary(self) -> BodySummary:
        declared = self._header(b"content-length")
        length = int(declared) if declared.isdecimal() and len(declared) < MAX_LENGTH_DIGITS else None
        return BodySummary(length, self._num_received, self._first, self._digest.hexdigest())

    def _ask_for_usage(self, body: bytes) -> None:
        if not self._trail.options.inject_usage or self._scope["path"] not in _WITH_USAGE_OPTION:
            return
        if (changed := ask_for_usage(body)) is not None:
            self._swallow = True
            self._unread = [{"type": "http.request", "body": changed, "more_body": False}]
            headers = self._scope["headers"]
            others = [pair for pair in headers if pair[0].lower() != b"content-length"]
            headers[:] = [*others, (b"content-length", str(len(changed)).encode())]

    # -- what the server sends

    async def _write(self, message: Message) -> None:
        """The server's `send`. Every complete event leaves in the call that completed it."""
        if message["type"] == "http.response.start":
            self._begin(message)
            message = self._without_length(message)
        elif message["type"] == "http.response.body" and self._collector is not None:
            piece, is_last = message.get("body", b""), not message.get("more_body", False)
            if self._swallow:
                kept = self._collector.feed(piece)
                await self._pass_on({**message, "body": kept + self._collector.rest() if is_last else kept})
            else:
                await self._pass_on(message)
                self._collector.feed(piece)
            self._is_done = is_last
            return
        await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:  # what servers raise when the connection is closed
            self._is_gone = True
            raise

    def _begin(self, message: Message) -> None:
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        content_type = bytes(headers.get(b"content-type", b"")).decode("latin-1")
        self._http_status = message["status"]
        self._adapter_digest = digest_in(bytes(headers.get(_ADAPTER_HEADER, b"")).decode("latin-1"))
        self._is_encoded = bytes(headers.get(b"content-encoding", b"identity")) != b"identity"
        self._swallow = self._swallow and content_type.startswith(EVENT_STREAM) and not self._is_encoded
        self._collector = Collector(content_type, swallow_usage=self._swallow)

    def _without_length(self, message: Message) -> Message:
        if not self._swallow:
            return message
        headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"content-length"]
        return {**message, "headers": headers}

    # -- the end

    def _close(self, record: Record, error: BaseException | None) -> None:
        answer = self._answer()
        if self._is_encoded:
            answer.raw = None
            record.warnings = ["the reply is compressed and not recorded"]
        record.model = _model_asked(record.body) or answer.model
        if entry := self._middleware.catalog.entry(record.model):
            record.note(model_config=entry.config, adapter=entry.adapter)
        record.adapter_digest = self._adapter_digest
        if record.body is None:
            record.unread = self._summary()
        record.unauthenticated = self._http_status in _NOT_ADMITTED
        said = None
        if error is not None and not self._is_gone:
            said = {"type": type(error).__name__, "message": str(error)[:2000]}
        record.close(self._status(error, answer), http_status=self._http_status, answer=answer, error=said)

    def _answer(self) -> Answer:
        try:
            return Answer() if self._collector is None else self._collector.finish()
        except Exception:  # a server may say anything: its words may go unread, the request may not go unrecorded
            log.exception("what the server answered could not be read")
            return Answer()

    def _status(self, error: BaseException | None, answer: Answer) -> Status:
        if self._is_gone and not self._is_done:
            return "cancelled"
        if isinstance(error, asyncio.CancelledError):
            return "interrupted"
        if error is not None or self._http_status is None or not self._is_done:
            return "failed"
        if self._http_status < 400 and answer.error is not None:
            return "failed"  # an error told inside a stream
        return status_for(self._http_status)


def _model_asked(body: Any) -> str | None:
    if not isinstance(body, bytes):
        return None
    try:
        return _decode_model(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class _Asked(msgspec.Struct):
    model: str | None = None


_decode_model = msgspec.json.Decoder(_Asked).decode
