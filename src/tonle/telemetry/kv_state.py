"""Keys and values beyond the device as metrics: what each tier keeps, finds and costs; and the events about those on it.

Does: translate what the engine reports. Does not: appear where there are no tiers, or no events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


class TierState(Protocol):
    """The part of a tier's counts that is exported."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def queries(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def load_bytes(self) -> int: ...
    @property
    def load_s(self) -> float: ...
    @property
    def save_bytes(self) -> int: ...
    @property
    def save_s(self) -> float: ...
    @property
    def evicted(self) -> int: ...
    @property
    def damaged(self) -> int: ...
    @property
    def errors(self) -> int: ...


_GAUGES = {
    "blocks": ("num_blocks", "KV blocks that the tier has, as far as this server knows."),
    "bytes": ("num_bytes", "Bytes of them."),
}
_COUNTERS = {
    "queries": ("queries", "KV blocks that the tier was asked for."),
    "hits": ("hits", "Those of them that it had."),
    "load_bytes": ("load_bytes", "Bytes read back from the tier."),
    "load_seconds": ("load_s", "Seconds that took; bytes by seconds is its bandwidth."),
    "save_bytes": ("save_bytes", "Bytes handed to the tier."),
    "save_seconds": ("save_s", "Seconds that took."),
    "evictions": ("evicted", "KV blocks that left the tier for want of room."),
    "damaged": ("damaged", "KV blocks found short or with another checksum: they count as misses."),
    "errors": ("errors", "Times the tier could not be reached, read or written."),
}


def tier_metrics(model_name: str, tiers: Mapping[str, TierState]) -> Iterator[Metric]:
    for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (field, help_text) in table.items():
            family = kind(f"tonle:kv_tier_{name}", help_text, labels=["model_name", "tier"])
            for tier, state in tiers.items():
                family.add_metric([model_name, tier], getattr(state, field))
            yield family


def event_metrics(model_name: str, num_sent: int, num_lost: int) -> Iterator[Metric]:
    for name, help_text, value in (
        ("batches", "Batches of KV events that were handed to the publisher.", num_sent),
        (
            "batches_lost",
            "Batches that found no room; the next one tells subscribers to forget what they know.",
            num_lost,
        ),
    ):
        family = CounterMetricFamily(f"tonle:kv_event_{name}", help_text, labels=["model_name"])
        family.add_metric([model_name], value)
        yield family
