"""An OpenTelemetry collector for tests: takes OTLP over HTTP on a loopback port, decodes it with OpenTelemetry's classes."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status as WireStatus

KINDS = {
    WireSpan.SPAN_KIND_SERVER: "server",
    WireSpan.SPAN_KIND_CLIENT: "client",
    WireSpan.SPAN_KIND_INTERNAL: "internal",
}


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    failed: bool
    state: str
    attributes: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class Collector:
    url: str = ""
    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, list[tuple[dict[str, Any], int, float]]] = field(default_factory=dict)  # attributes, count, sum
    headers: list[dict[str, str]] = field(default_factory=list)  # of the posts
    bodies: list[bytes] = field(default_factory=list)
    status: int = 200  # to answer with

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        for _ in range(1200):
            if condition():
                return
            time.sleep(0.05)
        raise AssertionError(f"{what}; there are {[(span.service, span.name) for span in self.spans]}")

    def take(self, path: str, body: bytes) -> None:
        self.bodies.append(body)
        if path == "/v1/traces":
            self._take_spans(ExportTraceServiceRequest.FromString(body))
        elif path == "/v1/metrics":
            self._take_metrics(ExportMetricsServiceRequest.FromString(body))

    def _take_spans(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            service = _read(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(span, service) for span in scope.spans]

    def _take_metrics(self, request: ExportMetricsServiceRequest) -> None:
        """The latest of each: they are cumulative."""
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points = metric.histogram.data_points
                    assert all(point.count == sum(point.bucket_counts) for point in points)
                    assert all(len(point.bucket_counts) == len(point.explicit_bounds) + 1 for point in points)
                    self.metrics[metric.name] = [(_read(point.attributes), point.count, point.sum) for point in points]


def _span(span: WireSpan, service: str) -> Span:
    return Span(
        service, span.name, KINDS[span.kind], span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
        span.start_time_unix_nano, span.end_time_unix_nano, span.status.code == WireStatus.STATUS_CODE_ERROR,
        span.trace_state, _read(span.attributes),
    )  # fmt: skip


def _read(attributes: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = list(attributes)
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    if (name := value.WhichOneof("value")) == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, name)


@contextmanager
def running_collector(port: int = 0) -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            if collector.status == 200:
                collector.take(self.path, body)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join(120)
