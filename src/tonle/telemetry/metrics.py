"""Metrics under vLLM's names, so that existing dashboards, autoscalers and routers work unchanged.

Does: observe requests as they end, gaps between deltas as they come, and read the engine's state when scraped.
Does not: use prometheus_client's global registry: every server has its own.

Several processes of one server count in files of one folder, and the process that is scraped adds them up. prometheus_client
does so if PROMETHEUS_MULTIPROC_DIR names the folder when it is imported.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from tonle import __version__
from tonle.telemetry.engine_state import EngineState, EngineView
from tonle.telemetry.fine_buckets import bucket_of, upper_bound

# Upper bounds of the buckets. Seconds for a wait of the caller, seconds for one token, tokens.
_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)
_SHORT_GAP_S, _LONG_GAP_S = 1e-4, 100.0  # between which gaps are counted finely
_TOKENS = tuple(float(2**exponent) for exponent in range(18))

# vLLM's word for the engine's, where they differ.
_REASONS = {"cancelled": "abort"}


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """All metrics and their content type, in the format an `Accept` header asks for.

    Names are never escaped: those with a colon are valid in every version of both formats, and what prometheus_client
    makes of them for OpenMetrics 1.0 is not (samples lose the colon that their metadata keeps).
    """
    if openmetrics.CONTENT_TYPE_LATEST.partition(";")[0] in accept:
        body: bytes = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return body, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Memory, CPU time and open files of this process, its version, its Python and its garbage collector."""
    registry.register(_Build())
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)


class _Build(Collector):
    def collect(self) -> Iterable[Metric]:
        info = GaugeMetricFamily("tonle:build_info", "The version, in a label.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info


class TokenGaps:
    """Gaps between the tokens of answers, counted here and handed to a histogram when an answer ends: observing each
    one costs more than making its text, several times so where processes count together.

    They are counted in finer buckets than the histogram's, which are sums of them, for percentiles that are shown."""

    def __init__(self, histogram: Histogram, bounds: Sequence[float]) -> None:
        self._histogram = histogram
        fine = {upper_bound(bucket) for bucket in range(bucket_of(_SHORT_GAP_S), bucket_of(_LONG_GAP_S) + 1)}
        self._bounds = sorted(fine | set(bounds))
        self.counts = [0] * (len(self._bounds) + 1)  # since the start
        # The bucket of `fine_buckets.py` that each of them lies in
        self.buckets = [bucket_of(bound * (1 - 1e-9)) for bound in (*self._bounds, 2 * self._bounds[-1])]
        ends = [*(self._bounds.index(bound) + 1 for bound in bounds), len(self.counts)]
        self._parts = list(zip([0, *ends[:-1]], ends, strict=True))  # of `counts`, for each bucket of the histogram
        self._flushed = [0] * len(ends)
        self._sum_s = 0.0  # since the last flush

    def add(self, gap_s: float, count: int = 1) -> None:
        self.counts[bisect_left(self._bounds, gap_s)] += count
        self._sum_s += gap_s * count

    def flush(self) -> None:
        # prometheus_client has no way to observe a value many times; a test holds these two names.
        if not self._sum_s:
            return
        counts, flushed = self.counts, self._flushed
        for place, (start, end) in enumerate(self._parts):
            total = sum(counts[start:end])
            if total != flushed[place]:
                self._histogram._buckets[place].inc(total - flushed[place])
                flushed[place] = total
        self._histogram._sum.inc(self._sum_s)
        self._sum_s = 0.0


class Metrics(Collector):
    """Everything one server exports. Histograms are public: callers observe seconds or tokens."""

    def __init__(self, model_name: str, engine: EngineView, *, shared_dir: str | None = None) -> None:
        self.registry = CollectorRegistry()  # what this process counts
        self.shared = shared_dir is not None  # several processes count together
        self._model_name = model_name
        self.engine = engine
        self._scraped = self.registry if shared_dir is None else CollectorRegistry()
        state = EngineState(model_name, engine)
        self.gpus = state.gpus
        self._scraped.register(state)
        if shared_dir is None:
            add_process_metrics(self.registry)
        else:
            MultiProcessCollector(self._scraped, shared_dir)  # type: ignore[no-untyped-call]
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _WAIT_S)
        itl = self._histogram("inter_token_latency_seconds", "Gap between two deltas of one answer.", _TOKEN_S)
        self.itl = TokenGaps(itl, _TOKEN_S)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, per answer.", _TOKEN_S
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _WAIT_S)
        self.queue = self._histogram("request_queue_time_seconds", "Arrival to first scheduled.", _WAIT_S)
        self.prefill = self._histogram("request_prefill_time_seconds", "First scheduled to first token.", _WAIT_S)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last token.", _WAIT_S)
        self.inference = self._histogram("request_inference_time_seconds", "First scheduled to last token.", _WAIT_S)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens per request that were not found in the cache.", _TOKENS
        )
        self.generation_tokens = self._histogram("request_generation_tokens", "New tokens per request.", _TOKENS)
        self.longest_answer = self._histogram(
            "request_max_num_generation_tokens", "New tokens of a request's longest answer.", _TOKENS
        )
        self.max_tokens = self._histogram(
            "request_params_max_tokens", "Most new tokens of an answer, as asked.", _TOKENS
        )
        self.num_answers = self._histogram("request_params_n", "Answers per request, as asked (n).", _ANSWERS)
        self._finished = Counter(
            "vllm:request_success", "Answers by how they ended.", ("model_name", "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(model_name, reason)  # a rate needs the zero before the first event
        self._http = Counter(
            "tonle:http_requests", "HTTP requests by route and status.", ("method", "path", "status"),
            registry=self.registry,
        )  # fmt: skip

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", help_text, ("model_name",), registry=self.registry, buckets=buckets)
        return histogram.labels(self._model_name)

    def count_finished(self, reason: str) -> None:
        self._finished.labels(self._model_name, _REASONS.get(reason, reason)).inc()

    def count_http(self, method: str, path: str, status: int) -> None:
        """`path` is a route's pattern, never what the caller typed: the number of series stays bounded."""
        self._http.labels(method, path, str(status)).inc()

    def collect(self) -> Iterable[Metric]:
        """All of it, for the registry of a server that exports more."""
        return self._scraped.collect()

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, in the format the `Accept` header asks for."""
        return exposition(self._scraped, accept)
