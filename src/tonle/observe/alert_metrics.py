"""Alerts as metrics, read at the moment of a scrape.

Does: translate counters that `Alerts` keeps anyway. Does not: keep numbers of its own. Register it with a server's registry.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tonle.observe.alerts import KINDS, Alerts


class AlertMetrics(Collector):
    def __init__(self, alerts: Alerts) -> None:
        self._alerts = alerts

    def collect(self) -> Iterator[Metric]:
        firing = GaugeMetricFamily("tonle:alerts_firing", "What is wrong now.", labels=["kind"])
        fired = CounterMetricFamily("tonle:alerts", "Alerts that began.", labels=["kind"])
        for kind in KINDS:
            firing.add_metric([kind], self._alerts.num_firing(kind))
            fired.add_metric([kind], self._alerts.num_fired[kind])
        posts = CounterMetricFamily(
            "tonle:alert_posts",
            "Posts to the alert webhook; suppressed: changes that no post told of.",
            labels=["result"],
        )
        for result, count in self._alerts.posts.items():
            posts.add_metric([result], count)
        yield from (firing, fired, posts)
