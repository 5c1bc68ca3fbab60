"""Whether shared limits are within reach, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tonle.gateway.limits.shared import SharedLedger


class SharedMetrics(Collector):
    def __init__(self, ledger: SharedLedger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        ledger = self._ledger
        yield GaugeMetricFamily("tonle:state_up", "1 = the shared state answers.", value=float(ledger.lost is None))
        yield CounterMetricFamily("tonle:state_losses", "Times the shared state was lost.", value=ledger.num_losses)
        yield GaugeMetricFamily("tonle:state_leases", "Running requests it knows of.", value=ledger.num_running)
