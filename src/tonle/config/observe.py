"""`ObserveConfig`: the settings of what can be seen of a server: dashboard, history, targets, alerts, OpenTelemetry.

Does: hold them. Does not: act on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tonle.config import values
from tonle.config.audit import AuditConfig
from tonle.config.setting import OBSERVE, setting
from tonle.config.values import ValueType

HISTORY_MEMORY = "memory"
MAX_PRICE = 1e9  # per hour; any currency's price of a machine is below it, and sums of such prices are finite


def _observe(default: Any, type: ValueType, help: str) -> Any:
    return setting(OBSERVE, default, type, help)


def _target(what: str) -> Any:
    return _observe(
        None,
        values.optional(values.duration(), none="none"),
        f"p95 target of {what}; the dashboard and alerts report on it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig(AuditConfig):
    """Shared by `tonle serve` and `tonle gateway`."""

    dashboard: bool = _observe(
        True, values.boolean(), "Serve the page /dashboard, for keys of scope admin or dashboard."
    )
    history_db: str | None = _observe(
        None,
        values.optional(values.path(), none="the file $XDG_STATE_HOME/tonle/history-PORT.db"),
        "File that keeps the dashboard's figures and usage over a restart; memory: they are lost with the process.",
    )
    price_per_hour: float | None = _observe(
        None,
        values.optional(values.number(), none="none"),
        "Price of an hour of the machine that computes, of each backend; gives cost per request and per million tokens.",
    )
    sla_ttft_p95_s: float | None = _target("the time to the first token")
    sla_itl_p95_s: float | None = _target("the time between two tokens")
    alert_webhook: str | None = _observe(
        None,
        values.optional(values.text("URL"), none="none"),
        "Post missed targets, dead backends and alarms of the audit, and their ends, to this address.",
    )
    alert_secret: str | None = _observe(
        None, values.optional(values.secret(), none="unsigned"), "Secret that signs those posts (Standard Webhooks)."
    )
    otlp_endpoint: str | None = _observe(
        None,
        values.optional(values.text("URL"), none="none"),
        "Send OpenTelemetry traces and metrics to this collector, such as http://127.0.0.1:4318 (OTLP over HTTP).",
    )
    otlp_sample: float = _observe(
        1.0, values.fraction(), "Share of requests that are traced, unless their caller's trace says whether they are."
    )
