"""Keys and values that engines send each other, as metrics (docs/scale.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


class TransferState(Protocol):
    @property
    def num_loading(self) -> int: ...
    @property
    def loaded(self) -> Mapping[str, int]: ...
    @property
    def failed(self) -> Mapping[str, int]: ...
    @property
    def loaded_tokens(self) -> int: ...
    @property
    def num_leases(self) -> int: ...
    @property
    def num_leased_blocks(self) -> int: ...
    @property
    def leases_granted(self) -> int: ...
    @property
    def leases_fetched(self) -> int: ...
    @property
    def leases_expired(self) -> int: ...


def transfer_metrics(model_name: str, state: TransferState) -> Iterator[Metric]:
    gauges = (
        ("kv_loading_requests", "Requests whose prompt is being fetched.", state.num_loading),
        ("kv_leases", "Prompts kept for other servers.", state.num_leases),
        ("kv_leased_blocks", "KV blocks of these prompts.", state.num_leased_blocks),
    )
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(f"tonle:{name}", text, labels=["model_name"])
        gauge.add_metric([model_name], value)
        yield gauge
    loads = CounterMetricFamily(
        "tonle:kv_loads",
        "Requests whose prompt was to be fetched, by source; failed: all or some of it was computed here instead.",
        labels=["model_name", "source", "result"],
    )
    for result, counts in (("loaded", state.loaded), ("failed", state.failed)):
        for source, count in sorted(counts.items()):
            loads.add_metric([model_name, source, result], count)
    yield loads
    ended = CounterMetricFamily(
        "tonle:kv_leases_ended", "Prompts kept for other servers, by how that ended.", labels=["model_name", "how"]
    )
    ended.add_metric([model_name, "fetched"], state.leases_fetched)
    ended.add_metric([model_name, "expired"], state.leases_expired)
    yield ended
    granted = CounterMetricFamily("tonle:kv_leases_granted", "Prompts kept for other servers.", labels=["model_name"])
    granted.add_metric([model_name], state.leases_granted)
    yield granted
