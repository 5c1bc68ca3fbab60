"""The frame around every handler: method, errors as OpenAI bodies, one access line, one count.

Does: make sure each request ends in exactly one reply and one log line. Does not: know any particular endpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
from starlette.types import Receive, Scope, Send

from tonle.errors import ShuttingDown, TonleError
from tonle.protocol import sse
from tonle.protocol.errors import ErrorReply, error_reply, no_such_path, wrong_method
from tonle.replica.exchange import CallerGone, Exchange
from tonle.replica.replica import Replica
from tonle.telemetry.logs import one_line

log = logging.getLogger("tonle.replica")

Handler = Callable[[Replica, Exchange], Awaitable[None]]

# For the log and the metrics only: the caller hung up before the reply began.
STATUS_CALLER_GONE = 499


class Endpoint:
    """An ASGI application for one path."""

    def __init__(
        self, replica: Replica, path: str, methods: dict[str, Handler], *, id_prefix: str = "req", quiet: bool = False
    ) -> None:
        self._replica = replica
        self._path = path
        self._methods = methods
        self._id_prefix = id_prefix
        self._log_level = logging.DEBUG if quiet else logging.INFO

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._replica.options, id_prefix=self._id_prefix)
        note = problem = ""
        try:
            await self._handle(exchange)
        except CallerGone as gone:
            exchange.status = exchange.status or STATUS_CALLER_GONE
            note = f", caller {gone}"
        except asyncio.CancelledError:
            # The server cancels requests only to end the process. Passed on, it would be logged as a crash.
            problem = "cut off by shutdown"
            await _send_error(exchange, error_reply(ShuttingDown("the server is shutting down", retry_after_s=5)))
        except Exception as error:
            problem = error.message if isinstance(error, TonleError) else f"{type(error).__name__}: {error}"
            if not isinstance(error, TonleError):
                log.exception("%s %s failed, id %s", exchange.method, exchange.path, exchange.request_id)
            await _send_error(exchange, error_reply(error))
        finally:
            self._record(exchange, note, problem)

    async def _handle(self, exchange: Exchange) -> None:
        if not self._methods:
            await _send_error(exchange, no_such_path(exchange.path, "GET /docs lists what there is."))
            return
        # HEAD is GET without the body, which the server below leaves out
        handler = self._methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            await _send_error(exchange, wrong_method(exchange.method, exchange.path, list(self._methods)))
            return
        await handler(self._replica, exchange)

    def _record(self, exchange: Exchange, note: str, problem: str) -> None:
        self._replica.metrics.count_http(exchange.method, self._path, exchange.status)
        is_ours = problem and not 400 <= exchange.status < 500  # a stream that broke off has status 200
        level = logging.WARNING if is_ours else self._log_level
        if log.isEnabledFor(level):
            tokens = ""
            if exchange.usage is not None:
                tokens = f", {exchange.usage.prompt_tokens}+{exchange.usage.completion_tokens} tokens"
            log.log(
                level, "%s %s %d %.1f ms%s%s, id %s%s", exchange.method, exchange.path, exchange.status,
                exchange.elapsed_s * 1000, tokens, note, exchange.request_id, f": {one_line(problem)}" if problem else "",
            )  # fmt: skip


async def _send_error(exchange: Exchange, error: ErrorReply) -> None:
    """As a status while there is one to set, as an event in a stream that has begun."""
    with suppress(CallerGone):
        if exchange.streaming:
            await exchange.write(sse.event(error.body), last=True)
        elif not exchange.status:
            await exchange.reply(msgspec.json.encode(error.body), status=error.status, headers=error.headers)
