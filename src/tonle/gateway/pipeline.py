"""The order of the stages, and nothing else.

    admit → charge → open audit → replay from cache, or choose a route and send → watch the stream → close audit

Does: call the stages in order, make sure that each request ends in one reply and one record. Does not: know how a
stage works; and stages do not know each other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from tonle.audit.record import Record, Status, status_for
from tonle.cache import CachedResponse, Flight
from tonle.errors import CapacityError, TonleError
from tonle.gateway.admission import Ticket
from tonle.gateway.auth import Auth, check_model
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.prefill import prefill, prefill_body
from tonle.gateway.call import Call, estimate_tokens
from tonle.gateway.http.client import UpstreamError
from tonle.gateway.http.server import SHUTTING_DOWN
from tonle.gateway.limits.charging import Charging
from tonle.gateway.outgoing import body_for, headers_for
from tonle.gateway.outlet import Outlet
from tonle.gateway.recording import Recorder
from tonle.gateway.refusals import DeadlinePassed, UpstreamFailed
from tonle.gateway.relay import Relay
from tonle.gateway.replay import Replay
from tonle.gateway.routing.router import Route, Router, salt_of
from tonle.gateway.shadow import Shadows
from tonle.gateway.watchers import Watchers
from tonle.protocol.errors import error_reply

log = logging.getLogger("tonle.gateway")

BROKEN = (500, 502, 504)  # the backend is at fault: another may do better
BUSY = (429, 503)  # so may it now, without being at fault


@dataclass(slots=True, kw_only=True)
class Stages:
    auth: Auth
    ledger: Charging
    recorder: Recorder
    replay: Replay
    router: Router
    shadows: Shadows
    watchers: Watchers


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    retries: int
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
            if refusal is not None:
                raise refusal
            self._stages.recorder.admit()
            await self._answer(call, relay)
            status = "cached" if call.cache_state == "hit" else status_for(relay.status)
        except asyncio.CancelledError as cancelled:
            failure = cancelled
            status = "interrupted" if call.exchange.gone == SHUTTING_DOWN else "cancelled"
            if status == "interrupted":
                relay.fail(error_reply(CapacityError("the server is shutting down", retry_after_s=5)))
            raise
        except Exception as error:
            failure = error
            status = self._fail(call, relay, error)
        finally:
            self._leave(call, relay, record, status, failure)

    # -- admit, charge

    async def _enter(self, call: Call) -> BaseException | None:
        """What kept it out, if anything: a refused request is recorded like any other, and so is a caller's hang-up."""
        try:
            call.key = self._stages.auth.admit(call.exchange)
            call.read()
            call.check_strict(strict=self._options.strict)
            call.lease = await self._stages.ledger.charge(call.key, call.total_tokens)
            self._stages.router.resolve(call)
            check_model(call.key, call.asked_model or call.model)
        except (TonleError, asyncio.CancelledError) as refusal:
            return refusal
        return None

    # -- replay, or choose and send

    async def _answer(self, call: Call, relay: Relay) -> None:
        replay, router = self._stages.replay, self._stages.router
        found = await replay.find(call, router.identity(call.model))
        if isinstance(found, CachedResponse):
            relay.replay(found.body, found.content_type)
            return
        try:
            relay.keep_copy = found is not None
            await self._send(call, relay)
            if found is not None:
                found.land(_copy(call, relay))
        finally:
            if isinstance(found, Flight):
                found.land(None)  # has no effect after the line above
        self._stages.shadows.follow(call)

    async def _send(self, call: Call, relay: Relay) -> None:
        """To one backend after the other, until one answers; never again once the caller has seen a part."""
        failed: list[Backend] = []
        failure: UpstreamError | None = None
        while True:
            try:
                route = self._stages.router.choose(call, failed)
            except CapacityError:
                if failure is None and relay.status:
                    break  # the last one's own words are the best we have
                if failure is None:
                    raise
                raise failure from None
            try:
                await self._send_to(route, call, relay)
                failure = None
                if relay.status not in BROKEN + BUSY or len(failed) >= self._options.retries:
                    break
            except UpstreamError as error:
                failure = error
                if relay.began or error.kind == "timeout" or len(failed) >= self._options.retries:
                    raise
            failed.append(route.backend)
            call.attempts.append(route.backend.name)
        relay.finish()

    async def _send_to(self, route: Route, call: Call, relay: Relay) -> None:
        backend = route.backend
        call.backend, call.why = backend.name, route.why
        ticket = Ticket(call.key.id, call.priority, call.prompt_tokens, call.new_tokens)
        used: int | None = None
        try:
            await self._wait_turn(backend, ticket, call, relay)
            await self._exchange(route, call, relay)
            used = _used_tokens(call, relay)
        finally:
            backend.gate.leave(ticket, used_tokens=used)

    async def _wait_turn(self, backend: Backend, ticket: Ticket, call: Call, relay: Relay) -> None:
        if backend.gate.ask(ticket, time_left_s=call.time_left_s()):
            return
        assert ticket.turn is not None
        relay.waiting_for = lambda: f"queued, {backend.gate.ahead_of(ticket)} others wait"
        began_s = time.monotonic()
        try:
            await asyncio.wait_for(asyncio.shield(ticket.turn), call.time_left_s())
        except TimeoutError:
            raise DeadlinePassed("the request's deadline passed while it waited",
                                 retry_after_s=backend.gate.wait_estimate_s()) from None  # fmt: skip
        finally:
            call.queued_s += time.monotonic() - began_s

    async def _exchange(self, route: Route, call: Call, relay: Relay) -> None:
        backend = route.backend
        salt = salt_of(call.key.owner, self.salt_secret)
        headers = headers_for(call, backend, salt)
        first_s = min(backend.timeout_s, call.time_left_s() or backend.timeout_s)
        relay.waiting_for = lambda: "working"
        backend.breaker.begin()
        backend.num_sent += 1
        extra: dict[str, Any] | None = None
        try:
            if route.prefill is not None:
                first = prefill_body(call.body, call.model)
                params = await prefill(route.prefill, call.path, first, headers, first_s=first_s)
                call.prefill_backend = route.prefill.name
                extra = {"kv_transfer_params": params}
            body = body_for(call, backend, salt, extra)
            call.sent_s = time.monotonic()
            await backend.send("POST", call.path, body, headers, relay, first_s=first_s)
        except UpstreamError:
            backend.num_failed += 1
            backend.breaker.fail()
            raise
        except BaseException:
            backend.breaker.abandon()
            raise
        if relay.status in BROKEN:
            backend.num_failed += 1
            backend.breaker.fail()
        else:
            backend.breaker.succeed()

    # -- the end

    def _fail(self, call: Call, relay: Relay, error: Exception) -> Status:
        """Tell the caller, as far as that is possible."""
        if isinstance(error, UpstreamError):
            error = _explain(error, call)
        elif not isinstance(error, TonleError):
            log.exception("%s failed, id %s", call.path, call.request_id)
        reply = error_reply(error)
        relay.fail(reply)
        return status_for(reply.status)

    def _leave(self, call: Call, relay: Relay, record: Record, status: Status, failure: BaseException | None) -> None:
        relay.close()
        answer = relay.answer()
        used = 0 if status == "cached" else _used_tokens(call, relay)
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


def _used_tokens(call: Call, relay: Relay) -> int:
    """As the backend counted; else our estimate of what was read and written."""
    answer = relay.peek()
    if answer.usage is not None and isinstance(total := answer.usage.get("total_tokens"), int):
        return total
    if not answer.choices:
        return 0
    return call.prompt_tokens + sum(estimate_tokens(choice.text) for choice in answer.choices.values())


def _explain(error: UpstreamError, call: Call) -> UpstreamFailed | DeadlinePassed:
    left_s = call.time_left_s()
    if error.kind == "timeout" and left_s is not None and left_s <= 0:
        return DeadlinePassed("the request's deadline passed before the answer began")
    tried = ", ".join(dict.fromkeys([*call.attempts, call.backend]))
    return UpstreamFailed(f"no answer from {tried}: {error}")


def _error_facts(call: Call, failure: BaseException | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    if isinstance(failure, asyncio.CancelledError):
        return {"code": "cancelled", "message": call.exchange.gone or "cancelled"}
    code = failure.code if isinstance(failure, TonleError) else type(failure).__name__
    return {"code": code, "message": str(failure)}
