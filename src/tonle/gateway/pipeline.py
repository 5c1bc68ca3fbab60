"""The order of the stages, and nothing else.

    check the head → read → charge → resolve → open audit → replay from cache, or choose a route and send → watch the stream
    → close audit

Does: call the stages in order, keep their results, make sure that each request ends in one reply and one record. Does
not: know how a stage works; and stages do not know each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from tonle.audit.record import Record, Status, status_for
from tonle.cache import CachedResponse
from tonle.edge.client import UpstreamError
from tonle.edge.server import SHUTTING_DOWN
from tonle.errors import ShuttingDown, TonleError
from tonle.gateway.auth import check_model, owner_of
from tonle.gateway.cached_reply import CachedReplies
from tonle.gateway.call import Call, ReplyFacts
from tonle.gateway.deadline import by_deadline
from tonle.gateway.gateway_metrics import GatewayMetrics
from tonle.gateway.hops import VIA_HEADER, Hops
from tonle.gateway.limits.limiter import Limiter
from tonle.gateway.limits.media_limiter import MediaLimiter
from tonle.gateway.log_fields import about
from tonle.gateway.media_use import NO_MEDIA, MediaUse, used_media
from tonle.gateway.observing import Observer
from tonle.gateway.recording import Recorder
from tonle.gateway.refusals import DeadlinePassed, RateLimited, UpstreamFailed, UpstreamTimeout
from tonle.gateway.relay import Relay
from tonle.gateway.routing.router import Router, salt_of
from tonle.gateway.sending import Sender, is_out, joined
from tonle.gateway.shadow import Shadows
from tonle.gateway.stage_results import (
    BYPASS,
    AcceptedRequest,
    CacheLookup,
    ResolvedModel,
    SendResult,
    StageResults,
)
from tonle.gateway.under_way import UnderWay
from tonle.protocol.adapters import ADAPTER_HEADER, digest_in
from tonle.protocol.answers import Answer
from tonle.protocol.errors import error_reply

log = logging.getLogger("tonle.gateway")


@dataclass(slots=True, kw_only=True)
class Stages:
    limiter: Limiter
    media_limiter: MediaLimiter
    recorder: Recorder
    replay: CachedReplies
    router: Router
    sender: Sender
    shadows: Shadows
    metrics: GatewayMetrics
    under_way: UnderWay
    observer: Observer


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    keep_alive_s: float
    strict: bool = False
    gateway_id: str | None = None  # in X-Tonle-Via; None: drawn
    is_local: bool = False  # the engine of this process answers: the request goes no further
    trust_salt: bool = False  # X-Tonle-Salt of the caller, a gateway, says whose cached answers and prefixes are shared
    trust_router: bool = False  # kv_transfer_params of requests are the caller's, a router's, to set


class Ending(msgspec.Struct, frozen=True):
    """How a request ended: its status on record, what went wrong, and the reason for the log."""

    status: Status
    failure: BaseException | None = None
    problem: str | None = None


class Pipeline:
    def __init__(self, stages: Stages, options: PipelineOptions, *, salt_secret: str) -> None:
        self._stages = stages
        self._options = options
        self.salt_secret = salt_secret
        self.hops = Hops(options.gateway_id)

    async def run(self, call: Call) -> None:
        """The whole life of one generation request."""
        results, refusal = StageResults(), None
        self._stages.observer.began(call.exchange)
        try:
            accepted = await self._accept(call, results)
        except (Exception, asyncio.CancelledError) as error:
            refusal = error  # raised again below: a refusal is recorded like any other end
        record = self._stages.recorder.open(call, results.request)
        keep_alive_s = self._options.keep_alive_s if refusal is None else 0.0
        facts = ReplyFacts()
        if refusal is None:
            facts.chain_id = self._stages.recorder.link(record, accepted)
            facts.fallback = accepted.model.fallback or ""
            if call.exchange.header(VIA_HEADER):
                facts.passed = accepted.passed
        outlet = call.outlet(results.request, facts)
        relay = Relay(call.exchange, outlet, results.request, facts, keep_alive_s=keep_alive_s)
        relay.hash_media, relay.keep_media = self._stages.recorder.wants_of_media
        if refusal is None and accepted.model.entry.parent:
            self._stages.under_way.enter(accepted.model.name, relay)
        if refusal is None and record is not None and "tools" in accepted.request.body:
            relay.expect_end(functools.partial(self._note_calls, record, accepted, relay))
        ending = Ending("failed")
        try:
            if refusal is not None:
                with contextlib.suppress(DeadlinePassed):
                    await by_deadline(results.request, self._stages.recorder.room())
                raise refusal
            answering = self._answer(accepted, relay, results)
            if accepted.request.deadline_s is None:
                await answering
            else:
                await by_deadline(accepted.request, answering, until_begun=relay.expect_begin)
            await call.complete()
            ending = Ending("cached" if results.lookup.state == "hit" else status_for(relay.status))
        except asyncio.CancelledError as cancelled:
            if call.exchange.gone != SHUTTING_DOWN:
                ending = Ending("cancelled", cancelled)
                raise
            ending = Ending("interrupted", cancelled, SHUTTING_DOWN)
            relay.fail(error_reply(ShuttingDown(SHUTTING_DOWN, retry_after_s=5)))
            raise
        except Exception as error:
            shown = _shown(call, results, error, began=relay.began)
            reply = error_reply(shown)
            ending = Ending(status_for(reply.status), error, _problem(shown))
            relay.fail(reply)
        finally:
            self._leave(call, relay, record, results, ending)
            if ending.failure is not None:
                ending.failure.__traceback__ = None  # it leads back to this frame: a cycle, with the body in it

    async def _accept(self, call: Call, results: StageResults) -> AcceptedRequest:
        """Read, charge, resolve; the key was found when the head was checked. Raises what that refused it with, too."""
        stages, exchange = self._stages, call.exchange
        if exchange.key is not None:
            results.key = exchange.key
        if exchange.refusal is not None:
            raise exchange.refusal
        key = results.key
        passed = {} if self._options.is_local else self.hops.enter(exchange)
        owner = results.owner = owner_of(exchange, key, trust_salt=self._options.trust_salt)
        await call.prepare(owner)
        request = results.request = call.read(key, strict=self._options.strict, trust_router=self._options.trust_router)
        request.check_strict()
        charging = stages.limiter.charge(key, request.total_tokens)
        results.lease = await (charging if request.deadline_s is None else by_deadline(request, charging))
        if request.media:
            results.media_lease = stages.media_limiter.charge(key, request.media)
        model = results.model = stages.router.resolve(key, request, call.path)
        check_model(key, model.asked)
        results.accepted_s = time.monotonic()
        return AcceptedRequest(call, key, request, model, owner, salt_of(owner, self.salt_secret), passed)

    async def _answer(self, accepted: AcceptedRequest, relay: Relay, results: StageResults) -> None:
        """Replay, or choose and send; once there is room for the record."""
        await self._stages.recorder.room()
        self._stages.recorder.admit()
        lookup = results.lookup = await self._look_up(accepted, relay)
        if lookup.response is not None:
            found = lookup.response
            relay.replay(found.body, found.content_type, adapter=found.adapter)
            return
        try:
            relay.keep_copy = lookup.flight is not None
            sent = results.sent = await self._send(accepted, relay, results)
            if relay.facts.kv_blocks and not relay.facts.fallback:
                self._stages.router.learn(accepted, relay.facts.backend, relay.facts.kv_blocks)
            if sent.failure is not None:
                raise sent.failure
            relay.finish()
            if lookup.flight is not None and results.model is accepted.model:  # not an answer of another model
                lookup.flight.land(_copy(accepted, relay))
        finally:
            if lookup.flight is not None:
                lookup.flight.land(None)  # has no effect after the line above
        results.shadow = self._stages.shadows.follow(accepted)

    async def _send(self, accepted: AcceptedRequest, relay: Relay, results: StageResults) -> SendResult:
        """To the model's backends; if they are all out, to those of its fallbacks."""
        stages, sent = self._stages, await self._stages.sender.send(accepted, relay)
        for model in stages.router.in_place_of(accepted):
            if not is_out(sent) or relay.began or accepted.request.is_late:
                break
            self._change_model(relay, results, model)
            tried = await stages.sender.send(msgspec.structs.replace(accepted, model=model), relay)
            if not tried.backend and is_out(tried):  # so are its own: what the first ones said is more to the point
                self._change_model(relay, results, accepted.model)
                continue
            sent = joined(sent, tried)
        return sent

    def _change_model(self, relay: Relay, results: StageResults, model: ResolvedModel) -> None:
        """Another model answers from here on."""
        under_way, before = self._stages.under_way, results.model
        if before is not None and before.entry.parent:
            under_way.leave(before.name, relay)
        if model.entry.parent:
            under_way.enter(model.name, relay)
        results.model, relay.facts.fallback = model, model.fallback or ""

    async def _look_up(self, accepted: AcceptedRequest, relay: Relay) -> CacheLookup:
        if not self._stages.replay.applies_to(accepted):
            return BYPASS
        relay.facts.cache_state = "miss"  # for a stream that begins, with comments, while an identical request runs
        lookup = await self._stages.replay.find(accepted)
        relay.facts.cache_state = lookup.state
        return lookup

    def _leave(self, call: Call, relay: Relay, record: Record | None, results: StageResults, ending: Ending) -> None:
        """Settle, close audit, count; the only place that tells the log why a request failed."""
        relay.close()
        if results.model is not None and results.model.entry.parent:
            self._stages.under_way.leave(results.model.name, relay)
            self._note_adapter(relay, results)
        try:
            answer = relay.answer()
        except Exception as error:
            # A server may say anything: its words may go unread, the request may not go unrecorded.
            log.exception(
                "what %s answered could not be read, id %s",
                results.backend,
                call.request_id,
                extra=about(call.exchange),
            )
            answer = Answer()
            ending = Ending(ending.status, ending.failure or error, ending.problem)
        if ending.failure is None and (answer.error is not None or relay.status >= 400):
            # A stream that its server ended with an error has status 200, and failed.
            ending = Ending(ending.status if relay.status >= 400 else "failed", problem=_reason_given(answer))
        if ending.problem is not None:
            backend = f"backend {results.backend}: " if results.backend and not relay.facts.is_local else ""
            call.exchange.problem = f"{backend}{ending.problem}"
        call.exchange.tokens = _tokens(answer)
        results.region = relay.region
        if results.lease is not None:
            results.lease.settle(results.used_tokens)
        if results.media_lease is not None:
            results.used_media = _used_media(relay, results, answer, ending)
            results.media_lease.settle(results.used_media)
        error_facts = _error_facts(call, ending.failure)
        made = None if relay.media is None else relay.media.copy
        self._stages.recorder.close(record, call, results, ending.status, answer, error=error_facts, made=made)
        self._stages.metrics.observe(call, results, ending.status, answer)
        limit = ending.failure.limit if isinstance(ending.failure, RateLimited) else ""
        self._stages.observer.ended(call, relay.facts, results, ending.status, answer, error=error_facts, limit=limit)

    def _note_calls(self, record: Record, accepted: AcceptedRequest, relay: Relay) -> None:
        with contextlib.suppress(Exception):  # a server may say anything; `_leave` tells of it
            self._stages.recorder.note_calls(record, accepted.owner, relay.peek())

    def _note_adapter(self, relay: Relay, results: StageResults) -> None:
        """What computed the answer, as its sender tells; if the lists of models say something else, they are old."""
        assert results.model is not None
        digest = results.adapter_digest = digest_in(relay.headers.get(ADAPTER_HEADER))
        if digest is not None and results.backend and digest != results.model.entry.adapter_digest:
            self._stages.router.refresh_soon(results.backend)


def _shown(call: Call, results: StageResults, failure: Exception, *, began: bool) -> Exception:
    """What the caller is told about it. A bug is logged here, with its trace."""
    if isinstance(failure, UpstreamError):
        return _explained(failure, results, began=began)
    if not isinstance(failure, TonleError):
        log.error("%s failed, id %s", call.path, call.request_id, exc_info=failure, extra=about(call.exchange))
    return failure


def _problem(error: Exception) -> str:
    return error.message if isinstance(error, TonleError) else f"{type(error).__name__}: {error}"


def _explained(error: UpstreamError, results: StageResults, *, began: bool) -> UpstreamFailed:
    if began:
        return UpstreamFailed(f"the answer of {results.backend} broke off: {error}")
    failed = () if results.sent is None else results.sent.failed
    tried = ", ".join(dict.fromkeys([*failed, results.backend]))
    return (UpstreamTimeout if error.timed_out else UpstreamFailed)(f"no answer from {tried}: {error}")


def _copy(accepted: AcceptedRequest, relay: Relay) -> CachedResponse | None:
    """What may be replayed. With an adapter, only what its listed content computed: the key is made of that."""
    body, adapter = relay.copy, relay.headers.get(ADAPTER_HEADER, "")
    entry = accepted.model.entry
    if body is None or (entry.parent and digest_in(adapter) != entry.adapter_digest):
        return None
    content_type = relay.headers.get("content-type", "application/json")
    return CachedResponse(
        body=body, content_type=content_type, stream=accepted.request.stream, request_id=accepted.call.request_id,
        adapter=adapter if entry.parent else "",
    )  # fmt: skip


def _used_media(relay: Relay, results: StageResults, answer: Answer, ending: Ending) -> MediaUse:
    """As the reply tells. Who leaves while a backend works pays what was estimated; what failed costs nothing."""
    assert results.request is not None
    if isinstance(ending.failure, asyncio.CancelledError | DeadlinePassed):
        return results.request.media if relay.asked else NO_MEDIA
    done = relay.status == 200 and ending.failure is None
    return used_media(results.request.media, relay.headers, answer) if done else NO_MEDIA


def _tokens(answer: Answer) -> tuple[int, int] | None:
    """Of prompt and answer, for the log."""
    usage = answer.usage or {}
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens", 0)
    return (prompt, completion) if isinstance(prompt, int) and isinstance(completion, int) else None


def _reason_given(answer: Answer) -> str:
    """What a backend said about its own failure. It may be anything."""
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
