"""The order of the stages, and nothing else.

    admit → charge → open audit → replay from cache, or choose a route and send → watch the stream → close audit

Does: call the stages in order, make sure that each request ends in one reply and one record. Does not: know how a
stage works; and stages do not know each other.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from tonle.audit.record import Record, Status, status_for
from tonle.cache import CachedResponse, Flight
from tonle.edge.client import UpstreamError
from tonle.edge.server import SHUTTING_DOWN
from tonle.errors import ShuttingDown, TonleError
from tonle.gateway.auth import Auth, check_model
from tonle.gateway.cached_reply import CachedReplies
from tonle.gateway.call import Call
from tonle.gateway.gateway_metrics import GatewayMetrics
from tonle.gateway.limits.limiter import Limiter
from tonle.gateway.outlet import Outlet
from tonle.gateway.recording import Recorder
from tonle.gateway.refusals import DeadlinePassed, UpstreamFailed
from tonle.gateway.relay import Relay
from tonle.gateway.routing.router import Router, salt_of
from tonle.gateway.sending import Sender, used_tokens
from tonle.gateway.shadow import Shadows
from tonle.protocol.answers import Answer
from tonle.protocol.errors import error_reply

log = logging.getLogger("tonle.gateway")


@dataclass(slots=True, kw_only=True)
class Stages:
    auth: Auth
    limiter: Limiter
    recorder: Recorder
    replay: CachedReplies
    router: Router
    sender: Sender
    shadows: Shadows
    watchers: GatewayMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    keep_alive_s: float
    strict: bool = False


class Pipeline:
    def __init__(self, stages: Stages, options: PipelineOptions, *, salt_secret: str) -> None:
        self._stages = stages
        self._options = options
        self.salt_secret = salt_secret

    async def run(self, call: Call, outlet: Outlet) -> None:
        """The whole life of one generation request."""
        refusal = await self._enter(call)
        record = self._stages.recorder.open(call)
        relay = Relay(call, outlet, keep_alive_s=0 if refusal else self._options.keep_alive_s)
        status: Status = "failed"
        failure: BaseException | None = refusal
        try:
            await self._stages.recorder.room()
            if refusal is not None:
                raise refusal
            self._stages.recorder.admit()
            await self._answer(call, relay)
            status = "cached" if call.cache_state == "hit" else status_for(relay.status)
        except asyncio.CancelledError as cancelled:
            failure = cancelled
            status = "interrupted" if call.exchange.gone == SHUTTING_DOWN else "cancelled"
            if status == "interrupted":
                call.exchange.problem = _problem(call, SHUTTING_DOWN)
                relay.fail(error_reply(ShuttingDown(SHUTTING_DOWN, retry_after_s=5)))
            raise
        except Exception as error:
            failure = error
            status = self._fail(call, relay, error)
        finally:
            self._leave(call, relay, record, status, failure)

    # -- admit, charge

    async def _enter(self, call: Call) -> BaseException | None:
        """What kept it out, if anything: a refused request is recorded like any other, and so is a caller's hang-up,
        and a bug of ours. `run` raises it again, so that all end the same way."""
        try:
            call.key = self._stages.auth.admit(call.exchange)
            call.read()
            call.check_strict(strict=self._options.strict)
            call.lease = await self._stages.limiter.charge(call.key, call.total_tokens)
            self._stages.router.resolve(call)
            check_model(call.key, call.asked_model or call.model)
        except (Exception, asyncio.CancelledError) as refusal:
            return refusal
        return None

    # -- replay, or choose and send

    async def _answer(self, call: Call, relay: Relay) -> None:
        replay, router = self._stages.replay, self._stages.router
        salt = salt_of(call.key.owner, self.salt_secret)
        found = await replay.find(call, router.identity(call.model))
        if isinstance(found, CachedResponse):
            relay.replay(found.body, found.content_type)
            return
        try:
            relay.keep_copy = found is not None
            await self._stages.sender.send(call, relay, salt)
            if found is not None:
                found.land(_copy(call, relay))
        finally:
            if isinstance(found, Flight):
                found.land(None)  # has no effect after the line above
        self._stages.shadows.follow(call, salt)

    # -- the end

    def _fail(self, call: Call, relay: Relay, error: Exception) -> Status:
        """Tell the caller, as far as that is possible."""
        if isinstance(error, UpstreamError):
            error = _explain(error, call, began=relay.began)
        elif not isinstance(error, TonleError):
            log.exception("%s failed, id %s", call.path, call.request_id)
        what = error.message if isinstance(error, TonleError) else f"{type(error).__name__}: {error}"
        call.exchange.problem = _problem(call, what)
        reply = error_reply(error)
        relay.fail(reply)
        return status_for(reply.status)

    def _leave(self, call: Call, relay: Relay, record: Record, status: Status, failure: BaseException | None) -> None:
        relay.close()
        try:
            answer = relay.answer()
            used = 0 if status == "cached" else used_tokens(call, relay.peek())
        except Exception as error:
            # A server may say anything: its words may go unread, the request may not go unrecorded.
            log.exception("what %s answered could not be read, id %s", call.backend, call.request_id)
            answer, used, failure = Answer(), call.prompt_tokens, failure or error
        if failure is None and (answer.error is not None or relay.status >= 400):
            call.exchange.problem = _problem(call, _told(answer))
            status = "failed" if relay.status < 400 else status  # a stream that its server ended with an error
        if call.lease is not None:
            call.lease.settle(used)
        self._stages.recorder.close(record, call, status, answer, error=_error_facts(call, failure))
        self._stages.watchers.observe(call, status, answer)


def _copy(call: Call, relay: Relay) -> CachedResponse | None:
    body = relay.copy
    if body is None:
        return None
    content_type = relay.headers.get("content-type", "application/json")
    return CachedResponse(body=body, content_type=content_type, stream=call.stream, request_id=call.request_id)


def _explain(error: UpstreamError, call: Call, *, began: bool) -> UpstreamFailed | DeadlinePassed:
    left_s = call.time_left_s()
    if error.kind == "timeout" and left_s is not None and left_s <= 0:
        return DeadlinePassed("the request's deadline passed before the answer began")
    if began:
        return UpstreamFailed(f"the answer of {call.backend} broke off: {error}")
    tried = ", ".join(dict.fromkeys([*call.attempts, call.backend]))
    return UpstreamFailed(f"no answer from {tried}: {error}")


def _problem(call: Call, what: str) -> str:
    """For the log."""
    return f"backend {call.backend}: {what}" if call.backend else what


def _told(answer: Answer) -> str:
    """What a backend said of its own failure. It may be anything."""
    error = answer.raw if answer.error is None else answer.error
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error or "it gives no reason")


def _error_facts(call: Call, failure: BaseException | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    if isinstance(failure, asyncio.CancelledError):
        return {"code": "cancelled", "message": call.exchange.gone or "cancelled"}
    code = failure.code if isinstance(failure, TonleError) else type(failure).__name__
    return {"code": code, "message": str(failure)}
