"""`OtlpSender`: spans and metrics on their way to a collector, by OpenTelemetry's exporters (OTLP over HTTP).

Does: queue spans (bounded, the oldest are dropped), send them from a thread, send metrics from time to time; one warning when
a collector stops answering, one line when it answers again; end within a bound. Does not: make spans (`otel_spans.py`).

What is not set here the exporters read from the SDK's own variables: OTEL_EXPORTER_OTLP_HEADERS, …_TIMEOUT, …_CERTIFICATE,
…_COMPRESSION, OTEL_BSP_… for the queue, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import Histogram
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExportResult, MetricsData
from opentelemetry.sdk.resources import Attributes, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tonle import __version__
from tonle.observe.otel_metrics import GenAiMetrics
from tonle.observe.otel_spans import SCOPE_NAME, SpanMaker
from tonle.observe.seen_request import SeenRequest
from tonle.observe.trace_facts import TraceFacts
from tonle.telemetry.logs import one_line

log = logging.getLogger("tonle.observe")

METRICS_EVERY_S = 15.0
FLUSH_S = 3.0  # the longest that a server waits at its end for what is still queued


class OtlpSender:
    """Its methods are called on the event loop's thread."""

    def __init__(self, endpoint: str, service: str) -> None:
        """`endpoint`: of the collector, without `/v1/…`."""
        resource = _ThisServer(_described(service))
        _last_words.take_over()
        self._make = SpanMaker(resource, __version__)
        self._outage = _Outage(endpoint)
        self._exporter = _WatchedExporter(OTLPSpanExporter(f"{endpoint}/v1/traces"), self._outage)
        self._spans = BatchSpanProcessor(self._exporter)
        self._metric_exporter = OTLPMetricExporter(f"{endpoint}/v1/metrics")
        temporality = (self._metric_exporter._preferred_temporality or {}).get(
            Histogram, AggregationTemporality.CUMULATIVE
        )  # OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE, which the SDK's readers take from here, too
        self._metrics = GenAiMetrics(resource, InstrumentationScope(SCOPE_NAME, __version__), temporality)
        self._task: asyncio.Task[None] | None = None

    def add(self, seen: SeenRequest, trace: TraceFacts | None) -> None:
        """`trace`: None if the request is not recorded in one; metrics count it all the same."""
        self._metrics.add(seen)
        if trace is not None:
            for span in self._make.spans(seen, trace):
                self._spans.on_end(span)

    def start(self) -> None:
        self._task = asyncio.create_task(self._send_metrics())

    async def stop(self) -> None:
        """What is queued is sent if the collector takes it within `FLUSH_S`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        rest = self._metrics.collect()
        flushed, _ = await asyncio.gather(
            _on_thread(self._spans.shutdown, within_s=FLUSH_S),
            _on_thread(partial(self._export, rest), within_s=FLUSH_S),
        )
        if not flushed:
            self._exporter.give_up()
        self._metric_exporter.shutdown()

    async def _send_metrics(self) -> None:
        while True:
            await asyncio.sleep(METRICS_EVERY_S)
            found = self._metrics.collect()
            await _on_thread(partial(self._export, found))

    def _export(self, found: MetricsData | None) -> None:
        """On a thread of its own."""
        if found is None:
            return
        _last_words.forget()
        result = self._metric_exporter.export(found)
        self._outage.note("metrics", fine=result is MetricExportResult.SUCCESS)


def _described(service: str) -> Attributes:
    """What its operator says of it in variables of the SDK comes last."""
    own = {"service.name": service, "service.version": __version__, "service.instance.id": str(uuid.uuid4())}
    return Resource(own).merge(OTELResourceDetector().detect()).attributes


class _ThisServer(Resource):
    """The encoder looks up the resource of every span; the SDK's writes itself out as JSON each time."""

    def __hash__(self) -> int:
        return id(self)


class _WatchedExporter(SpanExporter):
    """Tells when sending begins to fail, and when it works again. After `shutdown` nothing is sent."""

    def __init__(self, exporter: OTLPSpanExporter, outage: _Outage) -> None:
        self._exporter = exporter
        self._outage = outage
        self._closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._closed:
            return SpanExportResult.FAILURE
        _last_words.forget()
        result = self._exporter.export(spans)
        if not self._closed:
            self._outage.note("traces", fine=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def give_up(self) -> None:
        """Whatever is still tried ends at once."""
        self._outage.note("traces", fine=False, reason=f"the last ones were not taken within {FLUSH_S:g} s")
        self.shutdown()


class _Outage:
    """One line when it begins, one when it ends; traces and metrics share it, unless the collector takes one of them alone."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()  # each kind is sent from a thread of its own
        self._failing: set[str] = set()
        self._fine: set[str] = set()  # since the last warning

    def note(self, kind: str, *, fine: bool, reason: str | None = None) -> None:
        """`kind` (traces, metrics) was sent, or was not."""
        with self._lock:
            if fine:
                self._fine.add(kind)
                if kind in self._failing:
                    self._failing.remove(kind)
                    if not self._failing:
                        log.info("OpenTelemetry: %s takes %s again", self._endpoint, kind)
            elif kind not in self._failing:
                is_known = bool(self._failing) and kind not in self._fine
                self._failing.add(kind)
                if not is_known:
                    self._fine.clear()
                    self._warn(kind, reason or _last_words.said or "it gives no reason")

    def _warn(self, kind: str, reason: str) -> None:
        log.warning(
            "OpenTelemetry: %s cannot be sent to %s (otlp_endpoint) and are dropped until it takes them: %s",
            kind, self._endpoint, one_line(reason),
        )  # fmt: skip


class _SdkLog(logging.Handler):
    """What the SDK has to say, one line per failed try and dropped span: kept as the reason for our one warning, and written
    at level DEBUG only."""

    def __init__(self) -> None:
        super().__init__()
        self._own = threading.local()  # each exporter has its thread

    def take_over(self) -> None:
        logger = logging.getLogger("opentelemetry")
        if self not in logger.handlers:
            logger.addHandler(self)
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno >= logging.WARNING and self.said is None:
            self._own.said = message
        log.debug("OpenTelemetry: %s", one_line(message))

    @property
    def said(self) -> str | None:
        """The first complaint on this thread since `forget`: those after it are its consequences."""
        return getattr(self._own, "said", None)

    def forget(self) -> None:
        self._own.said = None


_last_words = _SdkLog()


async def _on_thread(work: Callable[[], None], *, within_s: float | None = None) -> bool:
    """`work` on a thread that is left behind if it takes longer: no executor, which the end of the process would wait for.
    False: it was left behind."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        except Exception as error:  # telemetry must not end a server
            log.debug("OpenTelemetry: %s", one_line(repr(error)))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="otlp", daemon=True).start()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await done.wait()
    return done.is_set()
