"""Adaptive tuning as metrics: what it allows now, what it aims for, how often it changed its mind.

Does: translate what the engine reports. Does not: appear where tuning is off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


class AdaptiveState(Protocol):
    """The part of the engine's statistics about tuning that is exported."""

    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def prefill_share(self) -> float: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def target_itl_ms(self) -> float | None: ...
    @property
    def target_ttft_ms(self) -> float | None: ...
    @property
    def num_changes(self) -> int: ...
    @property
    def unreachable(self) -> list[str]: ...
    @property
    def slow_share(self) -> float: ...


def adaptive_metrics(model_name: str, state: AdaptiveState) -> Iterator[Metric]:
    gauges: list[tuple[str, str, float | None]] = [
        ("max_num_batched_tokens", "Most tokens of a step in which sequences decode.", state.max_num_batched_tokens),
        ("prefill_share", "Most of a step that one prompt may take while others are present.", state.prefill_share),
        ("max_num_seqs", "Most sequences that may run.", state.max_num_seqs),
        ("target_itl_seconds", "Wanted time between tokens.", _seconds(state.target_itl_ms)),
        ("target_ttft_seconds", "Wanted time to the first token.", _seconds(state.target_ttft_ms)),
        ("target_unreachable", "1 if a target cannot be met.", float(bool(state.unreachable))),
        (
            "slow_step_share",
            "Recent steps that took longer than the wanted time between tokens, 0 to 1.",
            state.slow_share,
        ),
    ]
    for name, help_text, value in gauges:
        if value is not None:
            gauge = GaugeMetricFamily(f"tonle:adaptive_{name}", help_text, labels=["model_name"])
            gauge.add_metric([model_name], value)
            yield gauge
    changes = CounterMetricFamily("tonle:adaptive_changes", "Times the limits were changed.", labels=["model_name"])
    changes.add_metric([model_name], state.num_changes)
    yield changes


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3
