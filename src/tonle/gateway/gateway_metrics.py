"""What operators watch: counters and histograms of the gateway.

Does: observe requests as they end, read backends, cache and latency targets when scraped. Does not: judge (`observe/sla.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tonle.audit.record import STATUSES
from tonle.cache import Cache
from tonle.edge.exchange import Exchange
from tonle.gateway.backends.backend import Backend
from tonle.gateway.call import Call
from tonle.gateway.fast_metrics import FastCounter, FastHistogram
from tonle.gateway.stage_results import SendResult, StageResults
from tonle.gateway.used_tokens import counted
from tonle.observe.sla import Sla
from tonle.protocol.answers import Answer
from tonle.telemetry.metrics import add_process_metrics, exposition

_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class GatewayMetrics:
    """Owns the registry: nothing global."""

    def __init__(self, sla: Sla, backends: list[Backend], cache: Cache | None, *, process: bool = True) -> None:
        """`process`: also export the metrics of this process and count HTTP requests, unless the engine's metrics do."""
        self.sla = sla
        self.registry = CollectorRegistry()
        self.registry.register(_CurrentState(backends, cache, sla))
        if process:
            add_process_metrics(self.registry)
        self._calls = FastCounter("tonle:gateway_requests", "Requests by how they ended.", ("status", "http_status"))
        for status in STATUSES:
            self._calls.add(status, "200", count=0)  # a rate needs the zero before the first event
        self._tokens = FastCounter("tonle:gateway_tokens", "Tokens as backends counted them.", ("kind",))
        for kind in ("prompt", "completion"):
            self._tokens.add(kind, count=0)
        self._hedged = FastCounter(
            "tonle:gateway_hedged_requests", "Streams that were asked of a second backend too.", ("won_by",)
        )
        self._fallbacks = FastCounter(
            "tonle:gateway_fallbacks",
            "Requests that another model answered because all backends of theirs were out.",
            ("model", "fallback"),
        )
        self._http = FastCounter(
            "tonle:http_requests", "HTTP requests by route and status.", ("method", "path", "status")
        )
        self._latency = FastHistogram("tonle:gateway_request_seconds", "Arrival to the end of the reply.", _WAIT_S)
        self._queue = FastHistogram("tonle:gateway_queue_seconds", "Waiting for a backend.", _WAIT_S)
        self._first = FastHistogram("tonle:gateway_first_byte_seconds", "Arrival to a backend's first byte.", _WAIT_S)
        for collector in (
            self._calls,
            self._tokens,
            self._hedged,
            self._fallbacks,
            self._latency,
            self._queue,
            self._first,
        ):
            self.registry.register(collector)
        if process:
            self.registry.register(self._http)

    def count_http(self, method: str, path: str, status: int) -> None:
        """`path` is a route's pattern, never what the caller typed: the number of series stays bounded."""
        self._http.add(method, path, str(status))

    def observe(self, call: Call, results: StageResults, status: str, answer: Answer) -> None:
        """A request has ended."""
        exchange, sent = call.exchange, results.sent
        total_s = exchange.elapsed_s
        self._calls.add(status, str(exchange.status))
        if sent is not None and sent.hedge is not None:
            self._hedged.add("second" if sent.backend == sent.hedge.second else "first")
        if sent is not None and sent.backend and results.model is not None and results.model.fallback is not None:
            self._fallbacks.add(results.model.asked, results.model.fallback)
        if status != "cached" and (told := counted(answer.usage)) is not None:
            self._tokens.add("prompt", count=told.prompt)
            self._tokens.add("completion", count=told.new)
        if status not in ("ok", "cached", "failed"):
            # A refusal does not say how fast we are. A hang-up does if its caller had waited for longer than the target.
            if status == "cancelled" and total_s > self.sla.target_p95_s and call.computed:
                self._count_wait(exchange, sent, total_s)
            return
        self._latency.observe(total_s)
        queued_s, first_s = 0.0 if sent is None else sent.queued_s, 0.0
        if sent is not None and sent.first_byte_s is not None:
            first_s = sent.first_byte_s - exchange.arrived_s
            self._first.observe(first_s)
            if (engine := answer.engine_s) is not None:  # it has a queue of its own, and says where its time went
                queued_s += engine.get("queue", 0.0)
                first_s = queued_s + engine.get("prefill", 0.0)
            self._queue.observe(queued_s)
        if call.computed:
            self.sla.add(total_s, queued_s, first_s, failed=status == "failed")

    def _count_wait(self, exchange: Exchange, sent: SendResult | None, waited_s: float) -> None:
        """Of a caller that gave up: the answer would have taken at least as long."""
        queued_s, first_s = 0.0 if sent is None else sent.queued_s, waited_s
        if sent is not None and sent.first_byte_s is not None:
            first_s = sent.first_byte_s - exchange.arrived_s
        self.sla.add(waited_s, queued_s, first_s, failed=False)

    def render(self, accept: str) -> tuple[bytes, str]:
        return exposition(self.registry, accept)


class _CurrentState(Collector):
    """Read at the moment of a scrape."""

    def __init__(self, backends: list[Backend], cache: Cache | None, sla: Sla) -> None:
        self._backends = backends
        self._cache = cache
        self._sla = sla

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("tonle:backend_up", "1 = gets requests.", labels=["backend"])
        draining = GaugeMetricFamily("tonle:backend_draining", "1 = an admin lets it finish.", labels=["backend"])
        running = GaugeMetricFamily("tonle:backend_requests_running", "Sent and not answered.", labels=["backend"])
        waiting = GaugeMetricFamily("tonle:backend_requests_waiting", "Waiting here for it.", labels=["backend"])
        sent = CounterMetricFamily("tonle:backend_requests", "Requests sent.", labels=["backend"])
        failed = CounterMetricFamily("tonle:backend_failures", "Requests it failed on.", labels=["backend"])
        for backend in self._backends:
            up.add_metric([backend.name], float(backend.available))
            draining.add_metric([backend.name], float(backend.draining))
            running.add_metric([backend.name], backend.gate.num_inside)
            waiting.add_metric([backend.name], backend.gate.num_queued)
            sent.add_metric([backend.name], backend.num_sent)
            failed.add_metric([backend.name], backend.num_failed)
        yield from (up, draining, running, waiting, sent, failed)
        yield from self._targets()
        if self._cache is not None:
            stats = self._cache.stats
            yield CounterMetricFamily("tonle:cache_hits", "Answers from the cache.", value=stats.hits)
            yield CounterMetricFamily("tonle:cache_misses", "Answers that had to be computed.", value=stats.misses)
            yield CounterMetricFamily("tonle:cache_shared", "Answers shared by requests at once.", value=stats.shared)
            yield CounterMetricFamily("tonle:cache_errors", "Trips to the cache that failed.", value=stats.errors)
            if self._cache.num_entries is not None and self._cache.num_bytes is not None:
                yield GaugeMetricFamily("tonle:cache_entries", "Answers kept.", value=self._cache.num_entries)
                yield GaugeMetricFamily("tonle:cache_bytes", "Memory of them.", value=self._cache.num_bytes)
            yield GaugeMetricFamily("tonle:cache_hit_rate", "Hits of lookups, 0 to 1.", value=stats.hit_rate)

    def _targets(self) -> Iterator[Metric]:
        """Of whole requests (e2e), of the first token (ttft) and of the time between tokens (itl), where they are set."""
        met = float(bool(self._sla.report()["meets_sla"]))
        yield GaugeMetricFamily("tonle:meets_sla", "1 = the target of whole requests is met at this moment.", value=met)
        labels = ["target"]
        wanted = GaugeMetricFamily("tonle:sla_target_seconds", "The p95 that is wanted.", labels=labels)
        p95 = GaugeMetricFamily("tonle:sla_p95_seconds", "p95 of the last five minutes.", labels=labels)
        meets = GaugeMetricFamily("tonle:sla_met", "1 = the target is met (verdict of five minutes).", labels=labels)
        burn = GaugeMetricFamily("tonle:sla_burn_rate", "Share of requests beyond the target / 5 %.", labels=labels)
        for target in self._sla.verdict().targets:
            wanted.add_metric([target.name], target.target_s)
            if target.value_s is not None:
                p95.add_metric([target.name], target.value_s)
            meets.add_metric([target.name], float(target.meets))
            burn.add_metric([target.name], target.burn_rate)
        counted = CounterMetricFamily("tonle:sla_requests", "Requests held against the target.", labels=labels)
        beyond = CounterMetricFamily("tonle:sla_requests_beyond", "Those of them beyond the target.", labels=labels)
        for name, (num_counted, num_beyond) in self._sla.counts().items():
            counted.add_metric([name], num_counted)
            beyond.add_metric([name], num_beyond)
        yield from (wanted, p95, meets, burn, counted, beyond)
