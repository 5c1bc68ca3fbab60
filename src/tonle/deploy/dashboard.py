"""`dashboard`: one Grafana dashboard of what a server and a gateway measure.

Does: panels in two columns, over metrics that both have (tests compare the names with a real scrape). Does not: alerts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tonle.deploy.document import Document

_SOURCE = {"type": "prometheus", "uid": "prometheus"}
_WINDOW = "[$__rate_interval]"
_WIDTH, _HEIGHT = 12, 8  # of a panel; a row has 24 columns
_SERVER = '{job="server"}'
_GATEWAY = '{job="gateway"}'
_QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # as Grafana names it
    queries: tuple[tuple[str, str], ...]  # legend, PromQL
    help: str = ""


def _rate(metric: str, selector: str = _SERVER, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{selector}{_WINDOW}))"


def _quantiles(metric: str, selector: str = _SERVER) -> tuple[tuple[str, str], ...]:
    buckets = _rate(f"{metric}_bucket", selector, "le")
    return tuple((f"p{quantile * 100:g}", f"histogram_quantile({quantile}, {buckets})") for quantile in _QUANTILES)


_FAULTS = '{job="gateway", status=~"refused|failed|interrupted"}'

PANELS = (
    Panel("Requests", "reqps", (
        ("{{status}}", _rate("tonle:gateway_requests_total", _GATEWAY, "status")),
        ("finished by the engine", _rate("vllm:request_success_total")),
    )),
    Panel("Tokens", "short", (
        ("prompt", _rate("vllm:prompt_tokens_total")),
        ("generated", _rate("vllm:generation_tokens_total")),
    ), "Per second."),
    Panel("Time to first token", "s", _quantiles("vllm:time_to_first_token_seconds")),
    Panel("Time between tokens", "s", _quantiles("vllm:inter_token_latency_seconds")),
    Panel("Time of a whole request", "s", _quantiles("vllm:e2e_request_latency_seconds")),
    Panel("Time in the engine's queue", "s", _quantiles("vllm:request_queue_time_seconds")),
    Panel("Requests in the engine", "short", (
        ("running", f"sum(vllm:num_requests_running{_SERVER})"),
        ("waiting", f"sum(vllm:num_requests_waiting{_SERVER})"),
        ("preempted per second", _rate("vllm:num_preemptions_total")),
    ), "Waiting requests that do not go away: add replicas. Preemptions: the KV cache is too small."),
    Panel("KV cache in use", "percentunit", (("{{instance}}", f"vllm:kv_cache_usage_perc{_SERVER}"),)),
    Panel("Prompt tokens found in the prefix cache", "percentunit", (
        ("hits", f"{_rate('vllm:prefix_cache_hits_total')} / {_rate('vllm:prefix_cache_queries_total')}"),
    )),
    Panel("Errors", "reqps", (
        ("{{status}} {{http_status}}", _rate("tonle:gateway_requests_total", _FAULTS, "status, http_status")),
        ("backend failures", _rate("tonle:backend_failures_total", _GATEWAY)),
    )),
    Panel("Gateway: time of a request", "s", _quantiles("tonle:gateway_request_seconds", _GATEWAY)),
    Panel("Gateway: time in its queue", "s", _quantiles("tonle:gateway_queue_seconds", _GATEWAY)),
    Panel("Gateway: backends", "short", (
        ("{{backend}} up", f"tonle:backend_up{_GATEWAY}"),
        ("{{backend}} running", f"tonle:backend_requests_running{_GATEWAY}"),
        ("{{backend}} waiting", f"tonle:backend_requests_waiting{_GATEWAY}"),
    )),
    Panel("Gateway: answers from the cache", "percentunit", (("hits", f"tonle:cache_hit_rate{_GATEWAY}"),)),
    Panel("Gateway: audit records", "reqps", (
        ("written", _rate("tonle:audit_records_total", _GATEWAY)),
        ("lost", _rate("tonle:audit_records_lost_total", _GATEWAY)),
    ), "Lost records are a fault of the disk: see the gateway's log."),
    Panel("Memory of processes", "bytes", (("{{job}}", "sum by (job) (process_resident_memory_bytes)"),)),
)  # fmt: skip


def dashboard() -> Document:
    return {
        "uid": "tonle",
        "title": "Tonle",
        "tags": ["tonle", "llm"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        for index, (legend, query) in enumerate(panel.queries)
    ]
    row, column = divmod(number, 24 // _WIDTH)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        **({"description": panel.help} if panel.help else {}),
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }
