"""Open audit, close audit: the facts of a call into its record. The only file that knows both.

Does: translate. Does not: write, or decide how a call ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tonle.audit.record import Record, Status, status_for
from tonle.audit.trail import AuditTrail
from tonle.gateway.backends.buffered_reply import BufferedReply
from tonle.gateway.call import Call
from tonle.protocol.answers import Answer, Collector

MS = 1000.0
ROOM_S = 10.0  # the longest wait for the writer of records; then `admit` decides
LOOK_S = 0.005  # how often it is looked for


class Recorder:
    """With no trail, records are made and forgotten: nothing else differs."""

    def __init__(self, trail: AuditTrail | None) -> None:
        self._trail = trail
        self._crowd: asyncio.Task[None] | None = None  # ends when there is room again

    async def room(self) -> None:
        """Returns at once, unless records come faster than they can be written: then callers wait for the writer."""
        trail = self._trail
        if trail is None or not trail.crowded:
            return
        if self._crowd is None or self._crowd.done():
            self._crowd = asyncio.create_task(_until_room(trail))
        await asyncio.wait({self._crowd}, timeout=ROOM_S)

    def admit(self) -> None:
        """Raises `CapacityError` if records cannot be kept and requests must then be refused."""
        if self._trail is not None:
            self._trail.admit()

    def open(self, call: Call) -> Record:
        return self._open(call.exchange.path, call.request_id, call.exchange.client or None, call.raw)

    def _open(self, path: str, request_id: str, client: str | None, body: bytes) -> Record:
        if self._trail is None:
            return Record(_forget, path, request_id=request_id, client=client, body=body)
        return self._trail.open(path, request_id=request_id, client=client, body=body)

    def close(
        self, record: Record, call: Call, status: Status, answer: Answer, *, error: dict[str, Any] | None = None
    ) -> None:
        record.note(
            key_id=call.key.id,
            model=call.asked_model or call.model or None,
            model_config=call.model_config,
            adapter=_adapter(call),
            cache={"state": call.cache_state, "request_id": call.cached_from},
            route=_route(call),
            experiment=None if call.experiment is None else {"name": call.experiment, "arm": call.arm},
            warnings=[f"{warning.param}: {warning.message}" for warning in call.warnings] or None,
        )
        record.timings_ms.update(_timings(call, answer))
        record.close(status, http_status=call.exchange.status or None, answer=answer, error=error)

    def open_copy(self, call: Call, request_id: str, body: bytes) -> Callable[[BufferedReply, Exception | None], None]:
        """A record of its own for a copy that nobody waits for. Returns what closes it, once."""
        record = self._open(call.path, request_id, call.exchange.client or None, body)
        began_s = time.monotonic()
        record.note(key_id=call.key.id, route={**(call.shadow or {}), "why": "shadow", "shadow_of": call.request_id})

        def close(answer: BufferedReply, failure: Exception | None) -> None:
            collector = Collector(answer.headers.get("content-type"))
            collector.feed(answer.body)
            status: Status = "interrupted"  # the gateway was stopped meanwhile
            if answer.status or failure is not None:
                status = "failed" if failure is not None else status_for(answer.status)
            error = None if failure is None else {"code": type(failure).__name__, "message": str(failure)}
            record.timings_ms["total"] = (time.monotonic() - began_s) * MS
            record.close(status, http_status=answer.status or None, answer=collector.finish(), error=error)

        return close


async def _until_room(trail: AuditTrail) -> None:
    while trail.crowded:  # noqa: ASYNC110 - it is another thread that makes room
        await asyncio.sleep(LOOK_S)


def _forget(record: Record) -> None:
    pass


def _adapter(call: Call) -> str | None:
    """Servers list an adapter as a model with a parent."""
    return call.model if call.model_config and call.model_config.get("parent") else None


def _route(call: Call) -> dict[str, Any] | None:
    if not call.backend:
        return None
    route: dict[str, Any] = {"backend": call.backend, "model": call.model, "why": call.why}
    if call.attempts:
        route["failed"] = call.attempts
    if call.prefill_backend is not None:
        route["prefill"] = call.prefill_backend
    if call.hedge is not None:
        route["hedge"] = call.hedge
    if call.shadow is not None:
        route["shadow"] = call.shadow
    return route


def _timings(call: Call, answer: Answer) -> dict[str, float]:
    """Queue: in this gateway. Prefill and decode as seen from here, the way to the backend included."""
    arrived_s = call.exchange.arrived_s
    timings = {"queue": call.queued_s * MS}
    if call.sent_s is not None and call.first_byte_s is not None:
        timings["first_byte"] = (call.first_byte_s - arrived_s) * MS
    if call.stream and answer.first_s is not None and call.cache_state != "hit":
        timings["ttft"] = (answer.first_s - arrived_s) * MS
        if call.sent_s is not None:
            timings["prefill"] = (answer.first_s - call.sent_s) * MS
        if answer.last_s is not None:
            timings["decode"] = (answer.last_s - answer.first_s) * MS
    return {name: round(value, 3) for name, value in timings.items()}
