"""`dashboard`: one Grafana dashboard of what servers and gateways measure.

Does: rows of panels over metrics that they have (tests compare the names with real scrapes), with variables for the data source,
the models, the servers and the gateways. Does not: alert (`alert_rules.py`).

A server exports the metrics of a gateway as well, for it is one, with the engine in place of backends: `backend="local"`. So
panels of gateways select by `$gateway`, and nothing is counted twice where a gateway stands in front of servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tonle.deploy.document import Document

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WINDOW = "[$__rate_interval]"
_COLUMNS = 24  # of a row
_HEIGHT = 8  # of a chart
_STAT_HEIGHT = 4
_ENGINE = '{model_name=~"$model_name", instance=~"$instance"}'
_SERVER = '{instance=~"$instance"}'
_GATEWAY = '{instance=~"$gateway"}'
_BOTH = '{instance=~"$instance|$gateway"}'
_QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # as Grafana names it
    queries: tuple[tuple[str, str], ...]  # legend, PromQL
    help: str = ""
    type: Literal["timeseries", "stat"] = "timeseries"
    width: int = 12
    red_from: float | None = None  # of a stat
    red_below: float | None = None  # of a stat
    most: float | None = None  # of the axis


def _rate(metric: str, selector: str = _ENGINE, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{selector}{_WINDOW}))"


def _quantile(quantile: float, metric: str, selector: str = _ENGINE) -> str:
    return f"histogram_quantile({quantile}, {_rate(f'{metric}_bucket', selector, 'le')})"


def _quantiles(metric: str, selector: str = _ENGINE) -> tuple[tuple[str, str], ...]:
    return tuple((f"p{quantile * 100:g}", _quantile(quantile, metric, selector)) for quantile in _QUANTILES)


def _share(part: str, whole: str, selector: str = _ENGINE) -> str:
    return f"{_rate(part, selector)} / {_rate(whole, selector)}"


def _stat(title: str, unit: str, query: str, **options: Any) -> Panel:
    return Panel(title, unit, ((title, query),), type="stat", width=3, **options)


_FAULTS = '{instance=~"$gateway", status=~"refused|failed|interrupted"}'
_ERRORS = '{instance=~"$instance|$gateway", status=~"5.."}'
_ANSWERED = "tonle:cache_hits_total"

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Overview", (
        _stat("Requests", "reqps", _rate("vllm:request_success_total")),
        _stat("Output tokens / s", "short", _rate("vllm:generation_tokens_total")),
        _stat("TTFT p95", "s", _quantile(0.95, "vllm:time_to_first_token_seconds")),
        _stat("ITL p95", "s", _quantile(0.95, "vllm:inter_token_latency_seconds")),
        _stat("Waiting", "short", f"sum(vllm:num_requests_waiting{_ENGINE})"),
        _stat("KV cache, fullest", "percentunit", f"max(vllm:kv_cache_usage_perc{_ENGINE})", red_from=0.95),
        _stat("Errors (5xx)", "percentunit",
              f"{_rate('tonle:http_requests_total', _ERRORS)} / {_rate('tonle:http_requests_total', _BOTH)}",
              red_from=0.05, help="Share of HTTP requests that were answered with 5xx."),
        _stat("Targets met", "percentunit", f"min(tonle:sla_met{_BOTH})", red_below=1.0,
              help="100 %: all latency targets are met (sla_p95, sla_ttft_p95, sla_itl_p95)."),
        Panel("Answers by how they ended", "reqps", (
            ("{{finished_reason}}", _rate("vllm:request_success_total", by="finished_reason")),
        )),
        Panel("Tokens", "short", (
            ("prompt", _rate("vllm:prompt_tokens_total")),
            ("generated", _rate("vllm:generation_tokens_total")),
        ), "Per second."),
    )),
    ("Latency", (
        Panel("Time to first token", "s", _quantiles("vllm:time_to_first_token_seconds")),
        Panel("Time between tokens", "s", _quantiles("vllm:inter_token_latency_seconds")),
        Panel("Time of a whole request", "s", _quantiles("vllm:e2e_request_latency_seconds")),
        Panel("Where the time goes", "s", tuple(
            (name, _share(f"vllm:request_{name}_time_seconds_sum", f"vllm:request_{name}_time_seconds_count"))
            for name in ("queue", "prefill", "decode")
        ), "Mean per request."),
        Panel("p95 against its target", "s", (
            ("{{instance}} {{target}}", f"tonle:sla_p95_seconds{_BOTH}"),
            ("{{instance}} {{target}} target", f"tonle:sla_target_seconds{_BOTH}"),
        ), "Over the last five minutes, as the server judges."),
        Panel("Burn rate", "short", (("{{instance}} {{target}}", f"tonle:sla_burn_rate{_BOTH}"),),
              "Share of requests beyond the target, divided by the 5 % that may be. Above 1 the target is missed."),
    )),
    ("Engine", (
        Panel("Requests in the engine", "short", (
            ("{{instance}} running", f"vllm:num_requests_running{_ENGINE}"),
            ("{{instance}} waiting", f"vllm:num_requests_waiting{_ENGINE}"),
        ), "Waiting requests that do not go away: add replicas."),
        Panel("Time in the engine's queue", "s", _quantiles("vllm:request_queue_time_seconds")),
        Panel("KV cache in use", "percentunit", (("{{instance}}", f"vllm:kv_cache_usage_perc{_ENGINE}"),), most=1.0),
        Panel("Preemptions", "ops", (("{{instance}}", _rate("vllm:num_preemptions_total", by="instance")),),
              "Sequences that were set back because the KV cache was full."),
        Panel("Steps", "ops", (("{{instance}}", _rate("vllm:iteration_tokens_total_count", by="instance")),)),
        Panel("Tokens per step", "short", (
            ("mean", _share("vllm:iteration_tokens_total_sum", "vllm:iteration_tokens_total_count")),
        )),
        Panel("Length of prompts", "short", _quantiles("vllm:request_prompt_tokens"), "Tokens."),
        Panel("Length of answers", "short", _quantiles("vllm:request_generation_tokens"), "Tokens."),
    )),
    ("Cache", (
        Panel("Prompt tokens found in the prefix cache", "percentunit", (
            ("hits", _share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")),
        ), most=1.0),
        Panel("Prompt tokens that missed the prefix cache", "short", (
            ("{{reason}}", _rate("tonle:prefix_cache_missed_tokens_total", by="reason")),
        ), "Per second. new: no such beginning was computed before. evicted: it was dropped to make room. "
           "tail: less than a block, or the last token. off: the prefix cache is off."),
        Panel("Prompt tokens by source", "short", (
            ("{{source}}", _rate("vllm:prompt_tokens_by_source_total", by="source")),
        ), "Per second."),
        Panel("Response cache", "reqps", (
            ("hits", _rate(_ANSWERED, _BOTH)),
            ("shared by requests at once", _rate("tonle:cache_shared_total", _BOTH)),
            ("misses", _rate("tonle:cache_misses_total", _BOTH)),
        )),
        Panel("Response cache: hit rate", "percentunit", (("{{instance}}", f"tonle:cache_hit_rate{_BOTH}"),), most=1.0),
    )),
    ("Gateway and backends", (
        Panel("Requests", "reqps", (("{{status}}", _rate("tonle:gateway_requests_total", _GATEWAY, "status")),)),
        Panel("Errors", "reqps", (
            ("{{status}} {{http_status}}", _rate("tonle:gateway_requests_total", _FAULTS, "status, http_status")),
            ("backend failures", _rate("tonle:backend_failures_total", _GATEWAY)),
        )),
        Panel("Time of a request", "s", _quantiles("tonle:gateway_request_seconds", _GATEWAY)),
        Panel("Time in the gateway's queue", "s", _quantiles("tonle:gateway_queue_seconds", _GATEWAY)),
        Panel("Backends that get requests", "short", (("{{backend}}", f"tonle:backend_up{_GATEWAY}"),), most=1.0),
        Panel("Requests at backends", "short", (
            ("{{backend}} running", f"tonle:backend_requests_running{_GATEWAY}"),
            ("{{backend}} waiting", f"tonle:backend_requests_waiting{_GATEWAY}"),
        )),
    )),
    ("GPU and processes", (
        Panel("GPU in use", "percentunit", (("{{instance}}", f"tonle:gpu_utilization{_ENGINE}"),), most=1.0),
        Panel("GPU memory", "bytes", (
            ("{{instance}} used", f"tonle:gpu_memory_used_bytes{_ENGINE}"),
            ("{{instance}} total", f"tonle:gpu_memory_total_bytes{_ENGINE}"),
        )),
        Panel("Memory of processes", "bytes", (("{{instance}}", f"process_resident_memory_bytes{_BOTH}"),)),
        Panel("CPU of processes", "short", (("{{instance}}", _rate("process_cpu_seconds_total", _BOTH, "instance")),),
              "Cores."),
    )),
    ("Audit and alerts", (
        Panel("Audit records", "reqps", (
            ("written", _rate("tonle:audit_records_total", _BOTH)),
            ("lost", _rate("tonle:audit_records_lost_total", _BOTH)),
            ("requests refused for want of a record", _rate("tonle:audit_requests_refused_total", _BOTH)),
        ), "Lost records are a fault of the disk: see the server's log."),
        Panel("Audit records that wait", "short", (
            ("{{instance}} to be written", f"tonle:audit_queue{_BOTH}"),
            ("{{instance}} open requests", f"tonle:audit_open_records{_BOTH}"),
        )),
        Panel("Alerts", "short", (("{{instance}} {{kind}}", f"tonle:alerts_firing{_BOTH}"),), "What is wrong now."),
        Panel("Posts to the alert webhook", "ops", (
            ("{{result}}", _rate("tonle:alert_posts_total", _BOTH, "result")),
        )),
    )),
)  # fmt: skip


def dashboard() -> Document:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        panels.append(_row(len(panels) + 1, title, top))
        top += 1
        left = height = 0
        for panel in row:
            if left + panel.width > _COLUMNS:
                left, top = 0, top + height
            height = _STAT_HEIGHT if panel.type == "stat" else _HEIGHT
            panels.append(_panel(len(panels) + 1, panel, {"h": height, "w": panel.width, "x": left, "y": top}))
            left += panel.width
        top += height
    return {
        "uid": "tonle",
        "title": "Tonle",
        "description": "Servers and gateways of Tonle, and vLLM servers behind them.",
        "tags": ["tonle", "llm"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,  # one crosshair in all panels
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    source = {
        "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {},
        "hide": 0, "includeAll": False, "multi": False, "options": [], "refresh": 1, "regex": "",
    }  # fmt: skip
    return [
        source,
        _variable("model_name", "Model", "label_values(vllm:num_requests_running, model_name)"),
        _variable("instance", "Server", "label_values(vllm:num_requests_running, instance)"),
        _variable("gateway", "Gateway", 'label_values(tonle:backend_up{backend!="local"}, instance)'),
    ]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "label": label, "type": "query", "datasource": _SOURCE, "definition": query,
        "query": {"query": query, "refId": name}, "current": {"text": ["All"], "value": ["$__all"]}, "hide": 0,
        "includeAll": True, "multi": True, "options": [], "refresh": 2, "regex": "", "sort": 1,
    }  # fmt: skip


def _row(number: int, title: str, top: int) -> dict[str, Any]:
    place = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        for index, (legend, query) in enumerate(panel.queries)
    ]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.type == "stat":
        defaults["thresholds"] = {"mode": "absolute", "steps": _steps(panel)}
        options: dict[str, Any] = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value", "graphMode": "area", "justifyMode": "auto", "textMode": "value",
        }  # fmt: skip
    else:
        defaults["custom"] = {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never"}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": panel.type,
        "title": panel.title,
        **({"description": panel.help} if panel.help else {}),
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def _steps(panel: Panel) -> list[dict[str, Any]]:
    if panel.red_below is not None:
        return [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    if panel.red_from is not None:
        return [{"color": "green", "value": None}, {"color": "red", "value": panel.red_from}]
    return [{"color": "text", "value": None}]
