"""Which request a log line is about, as fields of a JSON line; lines for people say it in words.

Does: name the request and its trace. Does not: write lines (`telemetry/logs.py`).
"""

from __future__ import annotations

from typing import Any

from tonle.edge.exchange import Exchange
from tonle.observe.trace_context import TraceContext


def about(exchange: Exchange, **more: Any) -> dict[str, Any]:
    """`extra` of a call of the logger. A field that is None is left out."""
    trace: TraceContext | None = exchange.trace or TraceContext.of(exchange.headers)
    fields = {"request_id": exchange.request_id, "trace_id": None if trace is None else trace.trace_id, **more}
    return {"fields": {name: value for name, value in fields.items() if value is not None}}
