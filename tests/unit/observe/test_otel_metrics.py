"""The convention's metrics of generative AI, counted without the SDK's instruments."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tonle.observe import otel_metrics
from tonle.observe.otel_metrics import GenAiMetrics
from tonle.observe.seen_request import SeenRequest

OWN = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "tonle", "gen_ai.request.model": "m"}


def metrics(temporality: AggregationTemporality = AggregationTemporality.CUMULATIVE) -> GenAiMetrics:
    return GenAiMetrics(Resource({}), InstrumentationScope("tonle", "1"), temporality)


def seen(**fields: Any) -> SeenRequest:
    given: dict[str, Any] = {
        "id": "req-1", "arrived": 0.0, "path": "/v1/chat/completions", "model": "m", "status": "ok", "http_status": 200,
        "accepted_s": 0.0, "total_s": 2.0, "ttft_s": 0.3, "last_s": 1.3, "prompt_tokens": 7, "completion_tokens": 11,
    }  # fmt: skip
    return SeenRequest(**(given | fields))


def points(counted: GenAiMetrics) -> dict[str, list[HistogramDataPoint]]:
    data = counted.collect()
    if data is None:
        return {}
    assert encode_metrics(data).resource_metrics  # the exporter can send it
    (resource,) = data.resource_metrics
    (scope,) = resource.scope_metrics
    return {metric.name: list(metric.data.data_points) for metric in scope.metrics}  # type: ignore[arg-type]


def test_a_request_is_counted() -> None:
    counted = metrics()
    assert points(counted) == {}
    counted.add(seen())
    found = points(counted)
    assert {name: [(dict(point.attributes or {}), point.count, round(point.sum, 6)) for point in listed]
            for name, listed in found.items()} == {
        "gen_ai.server.request.duration": [(OWN, 1, 2.0)],
        "gen_ai.server.time_to_first_token": [(OWN, 1, 0.3)],
        "gen_ai.server.time_per_output_token": [(OWN, 1, 0.1)],
        "gen_ai.client.token.usage": [({**OWN, "gen_ai.token.type": "input"}, 1, 7.0),
                                      ({**OWN, "gen_ai.token.type": "output"}, 1, 11.0)],
    }  # fmt: skip


def test_the_buckets_are_the_sdks() -> None:
    """The same values in one of the SDK's histograms with the same bounds."""
    values = [0.0, 0.005, 0.01, 0.0100001, 0.3, 81.92, 1000.0]
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    theirs = meter.create_histogram("x", explicit_bucket_boundaries_advisory=list(otel_metrics._DURATION_S))
    counted = metrics()
    for value in values:
        theirs.record(value)
        counted.add(seen(total_s=value))
    data = reader.get_metrics_data()
    assert data is not None
    (expected,) = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
    assert isinstance(expected, HistogramDataPoint)
    (point,) = points(counted)["gen_ai.server.request.duration"]
    assert list(point.bucket_counts) == list(expected.bucket_counts)
    assert (point.count, point.sum, point.min, point.max) == (7, expected.sum, expected.min, expected.max)


def test_failures_count_by_reason_and_have_no_first_token() -> None:
    counted = metrics()
    counted.add(seen(status="failed", http_status=502, error="upstream_failed"))
    counted.add(seen(status="refused", http_status=404, error="model_not_found", model="any name", accepted_s=None))
    found = points(counted)
    assert list(found) == ["gen_ai.server.request.duration"]
    unknown = {name: value for name, value in OWN.items() if name != "gen_ai.request.model"}
    assert [dict(point.attributes or {}) for point in found["gen_ai.server.request.duration"]] == [
        {**OWN, "error.type": "upstream_failed"}, {**unknown, "error.type": "model_not_found"},
    ]  # fmt: skip


def test_a_cached_answer_used_no_tokens() -> None:
    counted = metrics()
    counted.add(seen(status="cached"))
    assert "gen_ai.client.token.usage" not in points(counted)


def test_sums_go_on_or_begin_again() -> None:
    for temporality, counts in ((AggregationTemporality.CUMULATIVE, [1, 2]), (AggregationTemporality.DELTA, [1, 1])):
        counted, found = metrics(temporality), []
        for _ in range(2):
            counted.add(seen())
            (point,) = points(counted)["gen_ai.server.request.duration"]
            found.append(point.count)
        assert found == counts


def test_series_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel_metrics, "MAX_SERIES", 3)
    counted = metrics()
    for number in range(10):
        counted.add(seen(model=f"m{number}"))
    listed = points(counted)["gen_ai.server.request.duration"]
    assert [point.count for point in listed] == [1, 1, 1, 7]
    assert dict(listed[-1].attributes or {}) == {"otel.metric.overflow": True}
