"""The audit trail as metrics, read at the moment of a scrape.

Does: translate counters the trail keeps anyway. Does not: keep numbers of its own. Register it with a server's
registry.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tonle.audit.trail import AuditTrail


class AuditMetrics(Collector):
    def __init__(self, trail: AuditTrail) -> None:
        self._trail = trail

    def collect(self) -> Iterator[Metric]:
        stats = self._trail.stats
        yield CounterMetricFamily("tonle:audit_records", "Audit records written.", value=stats.written)
        yield CounterMetricFamily("tonle:audit_records_lost", "Requests whose record was given up.", value=stats.lost)
        yield CounterMetricFamily(
            "tonle:audit_requests_refused", "Requests refused because records cannot be kept.", value=stats.refused
        )
        yield CounterMetricFamily(
            "tonle:audit_requests_counted",
            "Refused requests without a valid key that were counted instead of recorded one by one.",
            value=stats.unrecorded,
        )
        yield GaugeMetricFamily("tonle:audit_open_records", "Requests on their way.", value=self._trail.num_open)
        yield GaugeMetricFamily("tonle:audit_queue", "Records waiting to be written.", value=self._trail.num_queued)
        failing = float(stats.failing is not None)
        yield GaugeMetricFamily("tonle:audit_failing", "1 while records cannot be written.", value=failing)
