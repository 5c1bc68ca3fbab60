"""OpenTelemetry's metrics of generative AI servers, counted here and handed over as whole histograms.

Does: count each request in a few additions, build what an exporter sends. Does not: use the SDK's instruments, whose `record`
costs more than the rest of a request's bookkeeping together; or send.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tonle.observe.gen_ai import PROVIDER, operation_of
from tonle.observe.seen_request import SeenRequest

# The bounds that the convention recommends: seconds of a request, of a first token, of each further one; tokens.
_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_EACH_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(float(4**exponent) for exponent in range(14))

MAX_SERIES = 1000  # of one metric; what is beyond is counted together, as the SDK does
_OVERFLOW = (("otel.metric.overflow", True),)

Attributes = tuple[tuple[str, Any], ...]


class _Point:
    """One series."""

    __slots__ = ("counts", "max", "min", "sum")

    def __init__(self, num_bounds: int) -> None:
        self.counts = [0] * (num_bounds + 1)
        self.sum = 0.0
        self.min = float("inf")
        self.max = float("-inf")


class _Series:
    """One metric."""

    def __init__(self, name: str, unit: str, description: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._unit = unit
        self._description = description
        self._bounds = bounds
        self._points: dict[Attributes, _Point] = {}

    def add(self, attributes: Attributes, value: float) -> None:
        point = self._points.get(attributes)
        if point is None:
            if len(self._points) >= MAX_SERIES:
                attributes = _OVERFLOW
            point = self._points.setdefault(attributes, _Point(len(self._bounds)))
        point.counts[bisect_left(self._bounds, value)] += 1
        point.sum += value
        point.min = min(point.min, value)
        point.max = max(point.max, value)

    def metric(self, start_ns: int, now_ns: int, temporality: AggregationTemporality) -> Metric | None:
        """None: nothing was counted."""
        if not self._points:
            return None
        points = [
            HistogramDataPoint(
                dict(attributes), start_ns, now_ns, sum(point.counts), point.sum, list(point.counts), self._bounds,
                point.min, point.max,
            )
            for attributes, point in self._points.items()
        ]  # fmt: skip
        if temporality is AggregationTemporality.DELTA:
            self._points = {}
        return Metric(self._name, self._description, self._unit, Histogram(points, temporality))


class GenAiMetrics:
    """Used on one thread."""

    def __init__(self, resource: Resource, scope: InstrumentationScope, temporality: AggregationTemporality) -> None:
        self._resource = resource
        self._scope = scope
        self._temporality = temporality
        self._since_ns = time.time_ns()
        self._duration = _Series("gen_ai.server.request.duration", "s", "Arrival to the end of the reply.", _DURATION_S)
        self._first = _Series("gen_ai.server.time_to_first_token", "s", "Arrival to the first token.", _FIRST_S)
        self._each = _Series(
            "gen_ai.server.time_per_output_token", "s", "Mean time per token after the first, per answer.", _EACH_S
        )
        self._tokens = _Series("gen_ai.client.token.usage", "{token}", "Tokens of prompts and answers.", _TOKENS)

    def add(self, seen: SeenRequest) -> None:
        """A request has ended. A model's name counts only if there is such a model: a caller may ask for any."""
        own: Attributes = (("gen_ai.operation.name", operation_of(seen.path)), ("gen_ai.provider.name", PROVIDER))
        if seen.model and seen.accepted_s is not None:
            own += (("gen_ai.request.model", seen.model),)
        is_fine = seen.status in ("ok", "cached")
        error = "" if is_fine else seen.error or (str(seen.http_status) if seen.http_status else seen.status)
        self._duration.add((*own, ("error.type", error)) if error else own, seen.total_s)
        if not is_fine:
            return
        if seen.ttft_s is not None:
            self._first.add(own, seen.ttft_s)
        if (each_s := seen.itl_s) is not None:
            self._each.add(own, each_s)
        if seen.status == "ok" and (seen.prompt_tokens or seen.completion_tokens):
            self._tokens.add((*own, ("gen_ai.token.type", "input")), seen.prompt_tokens)
            self._tokens.add((*own, ("gen_ai.token.type", "output")), seen.completion_tokens)

    def collect(self) -> MetricsData | None:
        """None: there is nothing to send."""
        now_ns, temporality = time.time_ns(), self._temporality
        series = (self._duration, self._first, self._each, self._tokens)
        found = [each.metric(self._since_ns, now_ns, temporality) for each in series]
        if temporality is AggregationTemporality.DELTA:
            self._since_ns = now_ns
        metrics = [metric for metric in found if metric is not None]
        if not metrics:
            return None
        return MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(self._scope, metrics, "")], "")])
