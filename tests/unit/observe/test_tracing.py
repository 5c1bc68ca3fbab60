"""Which requests are traced; settings that cannot work; a collector that is dead."""

from __future__ import annotations

import asyncio
import builtins
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.otlp_collector import Collector, running_collector
from tests.unit.observe.test_otel_spans import facts, seen
from tonle.bench.server_process import free_port
from tonle.config.gateway import GatewayConfig
from tonle.errors import ConfigError
from tonle.observe import otlp_sender
from tonle.observe.trace_context import TraceContext
from tonle.observe.tracing import Tracing

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Kept:
    """A sender that sends nothing."""

    def add(self, *_: object) -> None:
        raise ValueError("on purpose")


def tracing(share: float) -> Tracing:
    return Tracing(Kept(), share)  # type: ignore[arg-type]


def open_tracing(endpoint: str, **settings: Any) -> Tracing:
    found = Tracing.of(GatewayConfig(otlp_endpoint=endpoint, **settings), "tonle-test")
    assert found is not None
    return found


def test_the_callers_decision_counts() -> None:
    for share in (0.0, 1.0):
        recorded = tracing(share).begin({"traceparent": f"00-{TRACE}-{SPAN}-01"})
        assert recorded.is_recorded and (recorded.trace_id, recorded.parent_id) == (TRACE, SPAN)
        ignored = tracing(share).begin({"traceparent": f"00-{TRACE}-{SPAN}-00"})
        assert ignored == TraceContext(TRACE, "", SPAN, False)


def test_without_a_callers_trace_a_share_is_traced() -> None:
    assert tracing(1.0).begin({}).is_recorded and not tracing(0.0).begin({}).is_recorded
    assert tracing(1.0).begin({"traceparent": "malformed"}).is_recorded
    some = tracing(0.25)
    num_recorded = sum(some.begin({}).is_recorded for _ in range(4000))
    assert 800 < num_recorded < 1200  # 1000 expected, one standard deviation is 27


def test_a_request_that_cannot_be_told_of_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    broken = tracing(1.0)
    for _ in range(3):
        broken.ended(seen(), None)
    assert [record.getMessage() for record in caplog.records] == ["the spans of a request could not be made, id req-1"]


def test_without_a_collector_there_is_no_tracing() -> None:
    assert Tracing.of(GatewayConfig(), "tonle-test") is None


def test_a_server_without_a_collector_never_imports_opentelemetry() -> None:
    code = "import sys, tonle.gateway.gateway; print(any('opentelemetry' in name for name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout == "False\n"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://", "http://[::1", "collector"])
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"such as http://127\.0\.0\.1:4318"):
        open_tracing(endpoint)


def test_an_address_with_a_path_of_the_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match="alone: /v1/traces and /v1/metrics are added"):
        open_tracing("http://127.0.0.1:4318/v1/traces/")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **named)

    for name in [name for name in sys.modules if name.startswith(("tonle.observe.ot", "opentelemetry"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'tonle\[otel\]'"):
        open_tracing("http://127.0.0.1:4318")


def sent_to(collector: Collector, number: int, **settings: Any) -> None:
    async def main() -> None:
        traces = open_tracing(collector.url, **settings)
        await traces.start()
        for _ in range(number):
            traces.ended(seen(accepted_s=0.0), facts())
        await traces.stop()

    asyncio.run(main())


def test_what_is_queued_is_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=mine")
    monkeypatch.setattr(otlp_sender, "FLUSH_S", 120.0)
    with running_collector() as collector:
        sent_to(collector, 3)
    assert len(collector.spans) == 3
    assert {span.service for span in collector.spans} == {"mine"}  # the operator's name for it
    ((own, count, total),) = collector.metrics["gen_ai.server.request.duration"]
    assert own["gen_ai.request.model"] == "m" and (count, total) == (3, 6.0)
    assert all(headers["authorization"] == "Bearer abc" for headers in collector.headers)


class Lines(logging.Handler):
    """At the root, where a program's own logging is. pytest's handler is added to the SDK's loggers as well."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    handler, root = Lines(), logging.getLogger()
    root.addHandler(handler)
    yield handler.records
    root.removeHandler(handler)


def test_a_dead_collector_costs_one_line_and_no_wait(
    lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is bounded, the end too; and nothing of what the SDK says reaches the log."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    monkeypatch.setattr(otlp_sender, "FLUSH_S", 0.2)
    collector = Collector(url=f"http://127.0.0.1:{free_port()}")
    sent_to(collector, 1000)
    (line,) = lines
    assert line.levelname == "WARNING" and line.getMessage().startswith(
        f"OpenTelemetry: traces cannot be sent to {collector.url} "
    )


def test_a_collector_that_refuses_and_comes_back_is_two_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    caplog.set_level(logging.INFO, logger="tonle")

    async def main(collector: Collector) -> None:
        traces = open_tracing(collector.url)
        await traces.start()
        collector.status = 404
        await until(lambda: traces.ended(seen(), facts()) or len(collector.headers) >= 3)
        collector.status = 200
        await until(lambda: traces.ended(seen(), facts()) or len(collector.spans) >= 3)
        await until(lambda: any("again" in record.getMessage() for record in caplog.records))
        await traces.stop()

    with running_collector() as collector:
        asyncio.run(main(collector))
    told = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "tonle.observe"]
    assert [level for level, _ in told] == ["WARNING", "INFO"]
    assert "404" in told[0][1] and told[1][1] == f"OpenTelemetry: {collector.url} takes traces again"


def test_traces_and_metrics_share_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tonle")
    outage = otlp_sender._Outage("http://collector")
    for kind, fine in (
        ("traces", True), ("traces", False), ("metrics", False), ("traces", False), ("metrics", True), ("traces", True),
        ("metrics", False), ("traces", True), ("traces", False), ("traces", True), ("metrics", True),
    ):  # fmt: skip
        outage.note(kind, fine=fine, reason="why")
    told = [
        (record.levelname, record.getMessage().removeprefix("OpenTelemetry: ").split(" ")[0:4])
        for record in caplog.records
    ]
    assert told == [
        ("WARNING", ["traces", "cannot", "be", "sent"]), ("INFO", ["http://collector", "takes", "traces", "again"]),
        ("WARNING", ["metrics", "cannot", "be", "sent"]), ("WARNING", ["traces", "cannot", "be", "sent"]),
        ("INFO", ["http://collector", "takes", "metrics", "again"]),
    ]  # fmt: skip


async def until(condition: Any) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came true")
