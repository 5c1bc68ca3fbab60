"""`Figures`: what `tonle top` shows, from two readings of /metrics.

Does: make rates, shares and percentiles from differences of counters and histograms, by the names of Tonle's servers and gateway
and of vLLM. Does not: fetch or draw.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from tonle.cli.metrics_page import Reading

PERCENTS = (50, 95, 99)
FAILED = ("failed", "interrupted")


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds. None: no request in this time."""

    name: str
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    target_s: float
    p95_s: float | None
    meets: bool
    burn_rate: float


@dataclass(frozen=True, slots=True)
class BackendFigures:
    name: str
    state: str  # up, draining, down
    running: int
    waiting: int
    requests_per_s: float
    failures_per_s: float


@dataclass(slots=True, kw_only=True)
class Figures:
    """None: the server does not tell, or nothing happened that a share could be of."""

    kind: str  # Tonle server, Tonle gateway, vLLM
    models: list[str]
    uptime_s: float | None = None
    over_s: float = 0.0  # rates and shares are over so long
    requests_per_s: float | None = None
    failed_per_s: float | None = None
    refused_per_s: float | None = None
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    preemptions_per_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None  # 0..1; of several engines the fullest
    gpu_utilization: float | None = None  # 0..1
    gpu_memory_used: float | None = None  # bytes
    gpu_memory_total: float | None = None
    prefix_hit_rate: float | None = None  # 0..1
    cache_hit_rate: float | None = None
    latency_over_s: float = 0.0  # percentiles are over so long
    latencies: list[Latency] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    backends: list[BackendFigures] = field(default_factory=list)
    alerts_firing: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Difference:
    """Between two readings. A counter that fell was started again: what it has now came since."""

    def __init__(self, older: Reading, newer: Reading) -> None:
        self._older = older
        self._newer = newer
        self.seconds = max(1e-3, newer.at_s - older.at_s)

    def added(self, name: str, **labels: str) -> float | None:
        now = self._newer.total(name, **labels)
        if now is None:
            return None
        before = self._older.total(name, **labels) or 0.0
        return now - before if now >= before else now

    def rate(self, *names: str, **labels: str) -> float | None:
        """Per second, of the first of these that exists."""
        for name in names:
            if (added := self.added(name, **labels)) is not None:
                return added / self.seconds
        return None

    def rates(self, name: str, label: str) -> dict[str, float]:
        values = self._newer.values(name, label)
        return {each: (self.added(name, **{label: each}) or 0.0) / self.seconds for each in values}

    def share(self, part: str, *rest: str) -> float | None:
        """Of `part` in all of these together. None: there was none of them."""
        counts = [self.added(name) or 0.0 for name in (part, *rest)]
        return counts[0] / sum(counts) if sum(counts) > 0 else None

    def percentile(self, histogram: str, percent: float) -> float | None:
        """Between the bounds of its bucket in proportion, as Prometheus' histogram_quantile does."""
        now, before = (self._buckets(reading, histogram) for reading in (self._newer, self._older))
        if not now:
            return None
        if any(now[bound] < before.get(bound, 0.0) for bound in now):
            before = {}
        counts = [(bound, now[bound] - before.get(bound, 0.0)) for bound in sorted(now)]
        wanted = counts[-1][1] * percent / 100
        if not wanted:
            return None
        low, below = 0.0, 0.0
        for bound, count in counts:
            if count >= wanted:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (wanted - below) / (count - below)
            low, below = bound, count
        return low

    @staticmethod
    def _buckets(reading: Reading, histogram: str) -> dict[float, float]:
        return {float(bound): count for bound, count in reading.values(f"{histogram}_bucket", "le").items()}


# Shown name, and histograms that may hold it: the first that has requests counts.
_LATENCIES = (
    ("TTFT", ("vllm:time_to_first_token_seconds",)),
    ("First byte", ("tonle:gateway_first_byte_seconds",)),
    ("ITL", ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")),
    ("Total", ("vllm:e2e_request_latency_seconds", "tonle:gateway_request_seconds")),
    ("Queue", ("vllm:request_queue_time_seconds", "tonle:gateway_queue_seconds")),
)


def figures(oldest: Reading, older: Reading, newer: Reading) -> Figures:
    """Rates since `older`, percentiles since `oldest`."""
    recent, long = Difference(older, newer), Difference(oldest, newer)
    has_engine = newer.has("vllm:")
    kind = "vLLM" if not newer.has("tonle:") else "Tonle server" if has_engine else "Tonle gateway"
    statuses = recent.rates("tonle:gateway_requests_total", "status")
    reasons = recent.rates("vllm:request_success_total", "finished_reason")
    return Figures(
        kind=kind,
        models=sorted(newer.values("vllm:num_requests_running", "model_name")),
        uptime_s=_uptime(newer),
        over_s=round(recent.seconds, 3),
        requests_per_s=recent.rate("tonle:gateway_requests_total", "vllm:request_success_total"),
        failed_per_s=sum(statuses.get(name, 0.0) for name in FAILED) if statuses else reasons.get("error"),
        refused_per_s=statuses.get("refused") if statuses else None,
        output_tokens_per_s=_tokens(recent, "vllm:generation_tokens_total", "completion"),
        prompt_tokens_per_s=_tokens(recent, "vllm:prompt_tokens_total", "prompt"),
        preemptions_per_s=recent.rate("vllm:num_preemptions_total"),
        running=newer.total("vllm:num_requests_running" if has_engine else "tonle:backend_requests_running"),
        waiting=newer.total("vllm:num_requests_waiting" if has_engine else "tonle:backend_requests_waiting"),
        kv_usage=_most(newer, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        gpu_utilization=_most(newer, "tonle:gpu_utilization"),
        gpu_memory_used=newer.total("tonle:gpu_memory_used_bytes"),
        gpu_memory_total=newer.total("tonle:gpu_memory_total_bytes"),
        prefix_hit_rate=_prefix_hits(long),
        cache_hit_rate=long.share("tonle:cache_hits_total", "tonle:cache_misses_total", "tonle:cache_shared_total"),
        latency_over_s=round(long.seconds, 3),
        latencies=_latencies(long, newer),
        targets=_targets(newer),
        backends=_backends(recent, newer) if kind == "Tonle gateway" else [],
        alerts_firing=None if (firing := newer.total("tonle:alerts_firing")) is None else int(firing),
    )


def _uptime(reading: Reading) -> float | None:
    started = reading.total("process_start_time_seconds")
    return None if not started else max(0.0, time.time() - started)


def _tokens(recent: Difference, engine_name: str, kind: str) -> float | None:
    """Of the engine, or as a gateway's backends counted them."""
    rate = recent.rate(engine_name)
    return rate if rate is not None else recent.rate("tonle:gateway_tokens_total", kind=kind)


def _most(reading: Reading, *names: str) -> float | None:
    for name in names:
        if found := reading.samples(name):
            return max(each.value for each in found)
    return None


def _prefix_hits(long: Difference) -> float | None:
    for name in ("vllm:prefix_cache", "vllm:gpu_prefix_cache"):
        if queries := long.added(f"{name}_queries_total"):
            return (long.added(f"{name}_hits_total") or 0.0) / queries
    return None


def _latencies(long: Difference, newer: Reading) -> list[Latency]:
    found = []
    for shown, histograms in _LATENCIES:
        names = [name for name in histograms if newer.samples(f"{name}_bucket")]
        if names and not (shown == "First byte" and newer.has("vllm:")):
            found.append(Latency(shown, *(long.percentile(names[0], percent) for percent in PERCENTS)))
    return found


def _targets(reading: Reading) -> list[Target]:
    p95, met, burn = (reading.values(f"tonle:sla_{name}", "target") for name in ("p95_seconds", "met", "burn_rate"))
    return [
        Target(name, target_s, p95.get(name), bool(met.get(name, 1.0)), burn.get(name, 0.0))
        for name, target_s in reading.values("tonle:sla_target_seconds", "target").items()
    ]


def _backends(recent: Difference, reading: Reading) -> list[BackendFigures]:
    draining = reading.values("tonle:backend_draining", "backend")
    running = reading.values("tonle:backend_requests_running", "backend")
    waiting = reading.values("tonle:backend_requests_waiting", "backend")
    sent = recent.rates("tonle:backend_requests_total", "backend")
    failed = recent.rates("tonle:backend_failures_total", "backend")
    return [
        BackendFigures(
            name=name,
            state="up" if is_up else "draining" if draining.get(name) else "down",
            running=int(running.get(name, 0)),
            waiting=int(waiting.get(name, 0)),
            requests_per_s=sent.get(name, 0.0),
            failures_per_s=failed.get(name, 0.0),
        )
        for name, is_up in reading.values("tonle:backend_up", "backend").items()
    ]
