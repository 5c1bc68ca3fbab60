"""`alert_rules`: Prometheus alerts over what servers and gateways measure, as rule groups.

Does: a file for Prometheus' `rule_files`; the same groups are the `spec` of a PrometheusRule. Does not: send: Alertmanager
does. Limits that depend on a deployment are constants here, to be changed in the rendered file.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonle.deploy.document import Document

_TTFT_P95_S = 2.0
_ITL_P95_S = 0.2
_WAITING = 10
_KV_FULL = 0.95
_ERROR_SHARE = 0.05
_SERVER_ERRORS = '{status=~"5.."}'
_ALLOWED = 0.05  # share of requests that may be beyond a p95 target

WARNING, CRITICAL = "warning", "critical"


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    expr: str
    summary: str
    description: str
    for_: str = "5m"
    severity: str = WARNING


def _p95(metric: str) -> str:
    return f"histogram_quantile(0.95, sum by (le, model_name, instance) (rate({metric}_bucket[5m])))"


def _beyond(window: str) -> str:
    """Share of requests beyond their target."""
    by = "sum by (target, instance)"
    return f"{by} (rate(tonle:sla_requests_beyond_total[{window}]))\n/ {by} (rate(tonle:sla_requests_total[{window}]))"


def _burn(rate: int, short: str, long: str) -> str:
    """The long window says that it matters, the short one that it still goes on."""
    limit = f"{rate} * {_ALLOWED}"
    return f"{_beyond(long)} > {limit}\nand {_beyond(short)} > {limit}"


def _http(selector: str = "") -> str:
    return f"sum by (instance) (rate(tonle:http_requests_total{selector}[5m]))"


GROUPS: dict[str, tuple[Rule, ...]] = {
    "tonle-latency": (
        Rule("TonleHighTimeToFirstToken", f"{_p95('vllm:time_to_first_token_seconds')} > {_TTFT_P95_S:g}",
             "{{ $labels.model_name }} at {{ $labels.instance }}: time to first token p95 is {{ $value | humanizeDuration }}",
             f"Above {_TTFT_P95_S:g} s for five minutes. Waiting requests: add replicas. Long prompts: look at the prefix "
             "cache's hits."),
        Rule("TonleHighTimeBetweenTokens", f"{_p95('vllm:inter_token_latency_seconds')} > {_ITL_P95_S:g}",
             "{{ $labels.model_name }} at {{ $labels.instance }}: time between tokens p95 is {{ $value | humanizeDuration }}",
             f"Above {_ITL_P95_S:g} s for five minutes. Fewer sequences at once (max_num_seqs), or a target (target_itl)."),
        Rule("TonleTargetBurnsFast", _burn(6, "5m", "1h"),
             "{{ $labels.instance }}: {{ $value | humanizePercentage }} of requests miss the {{ $labels.target }} target",
             "Six times as many as may, over the last hour and the last five minutes. GET /health and the dashboard "
             "say where the time goes.", for_="2m", severity=CRITICAL),
        Rule("TonleTargetBurns", _burn(2, "30m", "6h"),
             "{{ $labels.instance }}: {{ $value | humanizePercentage }} of requests miss the {{ $labels.target }} target",
             "Twice as many as may, over the last six hours and the last half hour.", for_="15m"),
    ),
    "tonle-engine": (
        Rule("TonleQueueGrows",
             f"vllm:num_requests_waiting > {_WAITING} and deriv(vllm:num_requests_waiting[10m]) > 0",
             "{{ $labels.instance }}: {{ $value }} requests wait, and more come than are finished",
             "For ten minutes. Add replicas, or limit callers.", for_="10m"),
        Rule("TonleKvCacheFull", f"vllm:kv_cache_usage_perc > {_KV_FULL:g}",
             "{{ $labels.instance }}: the KV cache is {{ $value | humanizePercentage }} full",
             "New requests wait for blocks, and running ones may be preempted. More GPU memory for it, shorter contexts, "
             "or more replicas."),
        Rule("TonlePreempts", "rate(vllm:num_preemptions_total[10m]) > 0.1",
             "{{ $labels.instance }}: {{ $value | humanize }} sequences per second are preempted and computed again",
             "The KV cache is too small for the sequences that run at once (max_num_seqs).", for_="10m"),
    ),
    "tonle-gateway": (
        Rule("TonleBackendDown",
             'tonle:backend_up{backend!="local"} == 0 unless on (instance, backend) tonle:backend_draining == 1',
             "{{ $labels.instance }}: backend {{ $labels.backend }} gets no requests",
             "It does not answer, or failed on several requests in a row; it is not being drained. The gateway's log says "
             "why.", for_="1m"),
        Rule("TonleNoBackend", 'max by (instance) (tonle:backend_up{backend!="local"}) == 0',
             "{{ $labels.instance }}: no backend is left", "Every request is refused.", for_="30s", severity=CRITICAL),
        Rule("TonleErrors", f"{_http(_SERVER_ERRORS)} / {_http()} > {_ERROR_SHARE:g}",
             "{{ $labels.instance }}: {{ $value | humanizePercentage }} of requests are answered with 5xx",
             "For five minutes. The log names the reason of each.", severity=CRITICAL),
    ),
    "tonle-audit": (
        Rule("TonleAuditFails", "tonle:audit_failing == 1", "{{ $labels.instance }}: audit records cannot be written",
             "Depending on audit_on_full, requests are refused or records wait in memory. Look at the disk and the log.",
             for_="0s", severity=CRITICAL),
        Rule("TonleAuditRecordsLost", "increase(tonle:audit_records_lost_total[15m]) > 0",
             "{{ $labels.instance }}: {{ $value | humanize }} audit records were lost",
             "The trail says so itself, in its next record.", for_="0s", severity=CRITICAL),
        Rule("TonleAlertsUndelivered", 'increase(tonle:alert_posts_total{result="failed"}[30m]) > 0',
             "{{ $labels.instance }}: alert_webhook does not take its posts", "The log says what it answers.", for_="0s"),
    ),
}  # fmt: skip


def alert_rules() -> Document:
    return {"groups": [{"name": name, "rules": [_rule(rule) for rule in rules]} for name, rules in GROUPS.items()]}


def _rule(rule: Rule) -> Document:
    return {
        "alert": rule.name,
        "expr": rule.expr,
        **({} if rule.for_ == "0s" else {"for": rule.for_}),
        "labels": {"severity": rule.severity},
        "annotations": {"summary": rule.summary, "description": rule.description},
    }
