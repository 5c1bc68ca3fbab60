"""The engine's state as metrics, read at the moment of a scrape.

Does: translate counters the engine keeps anyway, and ask the driver about its GPU. Does not: keep numbers of its own, or
touch the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tonle.telemetry.adaptive_state import AdaptiveState, adaptive_metrics
from tonle.telemetry.gpu import GpuMonitor
from tonle.telemetry.kv_state import TierState, event_metrics, tier_metrics
from tonle.telemetry.time_spent import MISS_REASONS
from tonle.telemetry.transfer_state import TransferState, transfer_metrics

_GPU_WAIT_S = 0.05  # a scrape is rendered on the event loop that answers requests


class Stats(Protocol):
    """The part of the engine's statistics that is exported."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def prefix_queries(self) -> int: ...
    @property
    def prefix_hits(self) -> int: ...
    @property
    def prefix_missed(self) -> Mapping[str, int]: ...  # by reason
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def adaptive(self) -> AdaptiveState | None: ...
    @property
    def running_adapters(self) -> list[str]: ...
    @property
    def waiting_adapters(self) -> list[str]: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def draft_tokens(self) -> int: ...
    @property
    def accepted_tokens(self) -> int: ...
    @property
    def accepted_at(self) -> list[int]: ...  # by place among the guesses of a step
    @property
    def kv_tiers(self) -> Mapping[str, TierState]: ...  # by name
    @property
    def kv_event_batches(self) -> int | None: ...  # None: there are no events
    @property
    def kv_event_batches_lost(self) -> int: ...
    @property
    def transfers(self) -> TransferState | None: ...  # None: with no other engine


class Card(Protocol):
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def gpu(self) -> str: ...
    @property
    def max_loras(self) -> int: ...  # 0: no adapters


class EngineView(Protocol):
    """An object with the engine's latest statistics; `card` is None until the engine is ready."""

    @property
    def stats(self) -> Stats: ...
    @property
    def card(self) -> Card | None: ...


class EngineState(Collector):
    def __init__(self, model_name: str, engine: EngineView) -> None:
        self._model_name = model_name
        self._engine = engine
        self.gpus = GpuMonitor()

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield self._gauge("num_requests_running", "Sequences in the running batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences waiting to be scheduled.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks that requests hold, 0 to 1.", stats.kv_usage)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits)
        yield self._missed(stats)
        yield self._counter("num_preemptions", "Times a running sequence was set back.", stats.num_preemptions)
        # As in vLLM the whole prompt counts; the engine counts what it computed and what it found apart.
        loaded = 0 if stats.transfers is None else stats.transfers.loaded_tokens
        prompt_tokens = stats.prompt_tokens + stats.prefix_hits + loaded
        yield self._counter("prompt_tokens", "Prompt tokens processed, cached ones included.", prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", stats.prefix_hits)
        yield self._by_source(stats, loaded)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._step_tokens(stats)
        yield from self._speculation(stats)
        if stats.adaptive is not None:
            yield from adaptive_metrics(self._model_name, stats.adaptive)
        if stats.transfers is not None:
            yield from transfer_metrics(self._model_name, stats.transfers)
        if stats.kv_tiers:
            yield from tier_metrics(self._model_name, stats.kv_tiers)
        if stats.kv_event_batches is not None:
            yield from event_metrics(self._model_name, stats.kv_event_batches, stats.kv_event_batches_lost)
        if (card := self._engine.card) is not None:
            info = GaugeMetricFamily(
                "vllm:cache_config_info",
                "Shape of the KV cache, in the labels.",
                labels=["model_name", "block_size", "num_gpu_blocks", "cache_dtype"],
            )
            info.add_metric([self._model_name, str(card.block_size), str(card.num_blocks), card.kv_dtype], 1)
            yield info
            if card.max_loras:
                yield self._adapters(card.max_loras, stats)
            yield from self._gpu(card.gpu)

    def _missed(self, stats: Stats) -> Metric:
        family = CounterMetricFamily(
            "tonle:prefix_cache_missed_tokens",
            "Prompt tokens that were not found in the prefix cache, by why not.",
            labels=["model_name", "reason"],
        )
        for reason in MISS_REASONS:  # a rate needs the zero before the first event
            family.add_metric([self._model_name, reason], stats.prefix_missed.get(reason, 0))
        return family

    def _by_source(self, stats: Stats, loaded: int) -> Metric:
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", labels=["model_name", "source"]
        )
        family.add_metric([self._model_name, "local_compute"], stats.prompt_tokens)
        family.add_metric([self._model_name, "local_cache_hit"], stats.prefix_hits)
        if stats.transfers is not None:
            family.add_metric([self._model_name, "external_kv_transfer"], loaded)
        return family

    def _step_tokens(self, stats: Stats) -> Metric:
        """Count and sum alone: the engine keeps no numbers per step for the buckets in between."""
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens per step.", labels=["model_name"])
        total = stats.prompt_tokens + stats.generation_tokens
        family.add_metric([self._model_name], [("+Inf", stats.num_steps)], total)
        return family

    def _speculation(self, stats: Stats) -> Iterator[Metric]:
        yield self._counter("spec_decode_num_drafts", "Times a step had guesses for a sequence.", stats.num_drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Guessed tokens that steps computed.", stats.draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Guessed tokens that were right.", stats.accepted_tokens)
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by their place among the guesses of a step.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(stats.accepted_at):
            family.add_metric([self._model_name, str(position)], count)
        yield family

    def _adapters(self, max_loras: int, stats: Stats) -> Metric:
        """As in vLLM the facts are in the labels, and the value is the time they are from."""
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters of requests that run and that wait, in the labels; the value is the time, in unix seconds.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        running, waiting = (",".join(sorted(names)) for names in (stats.running_adapters, stats.waiting_adapters))
        info.add_metric([str(max_loras), running, waiting], time.time())
        return info

    def _gpu(self, uuid: str) -> Iterator[Metric]:
        """Nothing where there is no NVIDIA GPU, or its driver does not tell."""
        use = self.gpus.read_within(uuid, _GPU_WAIT_S)
        if use is None:
            return
        if use.utilization is not None:
            yield self._gauge(
                "gpu_utilization", "Share of time in which a kernel runs, 0 to 1 (NVML).", use.utilization, of="tonle"
            )
        if use.memory_used is not None and use.memory_total is not None:
            used, total = "Memory in use on the GPU, by all processes.", "Memory of the GPU."
            yield self._gauge("gpu_memory_used_bytes", used, use.memory_used, of="tonle")
            yield self._gauge("gpu_memory_total_bytes", total, use.memory_total, of="tonle")

    def _gauge(self, name: str, help_text: str, value: float, *, of: str = "vllm") -> Metric:
        family = GaugeMetricFamily(f"{of}:{name}", help_text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help_text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
