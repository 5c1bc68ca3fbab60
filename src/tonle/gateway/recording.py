"""Open audit, close audit: the facts of a call into its record. The only file that knows both.

Does: translate. Does not: write, or decide how a call ended.
"""

from __future__ import annotations

from typing import Any

from tonle.audit.collect import Answer
from tonle.audit.record import Record, Status
from tonle.audit.trail import AuditTrail
from tonle.gateway.call import Call

MS = 1000.0


class Recorder:
    """With no trail, records are made and forgotten: nothing else differs."""

    def __init__(self, trail: AuditTrail | None) -> None:
        self._trail = trail

    def admit(self) -> None:
        """Raises `CapacityError` if records cannot be kept and requests must then be refused."""
        if self._trail is not None:
            self._trail.admit()

    def open(self, call: Call) -> Record:
        client = call.exchange.client or None
        if self._trail is None:
            return Record(_forget, call.exchange.path, request_id=call.request_id, client=client, body=call.raw)
        return self._trail.open(call.exchange.path, request_id=call.request_id, client=client, body=call.raw)

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
            warnings=[f"{name}: removed" for name in call.warnings] or None,
        )
        record.timings_ms.update(_timings(call, answer))
        record.close(status, http_status=call.exchange.status or None, answer=answer, error=error)


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
