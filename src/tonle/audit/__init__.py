"""The audit trail: one JSON file per request, chained by hashes and signed, so that anyone with the key can verify it.

Does: collect the facts of a request, write them off the request's path, redact, chain and sign, verify, find, export,
replay and prune. Does not: decide who may ask or what is answered; know the engine, torch, or any HTTP server.
Runs: `Record` and `Collector` on the event loop of the server; disk work on one thread of `AuditTrail`, or in a separate
process (`AuditTrail(…, own_process=True)`, as in the gateway).

    trail = AuditTrail(AuditOptions(directory=Path("audit")), on_alarm=print)
    trail.start()                                # repairs what a crash left, or raises ConfigError / InternalError
    trail.admit()                                # CapacityError if records cannot be kept and the policy is "refuse"
    record = trail.open("/v1/chat/completions", request_id="…", client="10.0.0.7", body=raw_body)
    record.note(key_id="k-1", model="qwen", adapter="khmer-qa", route={"backend": "b1", "why": "prefix"})
    collector = Collector("text/event-stream")
    forward = collector.feed(piece)              # bytes to pass on; the piece itself unless usage was asked for
                                                 # without the caller (Collector(..., swallow_usage=True))
    record.timings_ms["queue"] = 1.5             # also prefill, decode, ttft and any other time
    record.close("ok", http_status=200, answer=collector.finish())          # exactly once, in one `finally`
    record.close("refused", http_status=429, error={"code": "rate_limited", "message": "…"})
    record.close("cached", http_status=200, output="text", usage={"prompt_tokens": 7, …}, response_id="…")
    trail.close()                                # writes what is queued; open records become "interrupted"

`STATUSES` lists the possible statuses of a record; `status_for(http_status)` gives the usual one. On the request's path
nothing here waits for the disk, and only `admit` raises if the disk fails.
"""

from typing import TYPE_CHECKING, Any

from tonle.audit.audit_options import AuditOptions
from tonle.audit.audit_stats import Alarm, AuditStats
from tonle.audit.body_summary import BodySummary
from tonle.audit.record import STATUSES, Record, Status, status_for
from tonle.audit.trail import AuditTrail
from tonle.audit.usage import ask_for_usage
from tonle.protocol.answers import Answer, Collector

if TYPE_CHECKING:
    from tonle.audit.middleware import AuditMiddleware

__all__ = [
    "STATUSES",
    "Alarm",
    "Answer",
    "AuditMiddleware",
    "AuditOptions",
    "AuditStats",
    "AuditTrail",
    "BodySummary",
    "Collector",
    "Record",
    "Status",
    "ask_for_usage",
    "status_for",
]


def __getattr__(name: str) -> Any:
    """The middleware is imported on demand: it imports asyncio, which the writer process does not need."""
    if name == "AuditMiddleware":
        from tonle.audit.middleware import AuditMiddleware

        return AuditMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
