"""`EngineStats`: what `InferenceEngine.get_stats` shows.

Does: follow an engine's steps and requests, keep its counters after it has ended, and put one snapshot together. Does not:
add to a step more than a few numbers. The front's thread tells it, any thread asks.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from tonle.config.engine import EngineConfig
from tonle.engine.front import Front
from tonle.engine.generation import Generation
from tonle.engine.messages import LoopStats, ModelCard, Step
from tonle.engine.recent import Recent, profile
from tonle.telemetry.gpu import GpuMonitor

log = logging.getLogger("tonle.engine")


class EngineStats:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._gpus = GpuMonitor()
        self.begin()

    def begin(self) -> None:
        """The engine starts, perhaps again."""
        self._recent = Recent()
        self._totals = LoopStats()  # of an engine that has ended
        self._last: Step | None = None

    def add_step(self, step: Step) -> None:
        """A step tells what the ones before it took: how long it lasts itself is known after it."""
        last = self._last
        if not self._config.enable_metrics or step.stats.num_steps == (0 if last is None else last.stats.num_steps):
            return
        if last is not None:
            self._recent.add_step(step.stats.busy_s - last.stats.busy_s, len(last.tokens))
        self._last = step

    def add_request(self, generation: Generation) -> None:
        """One that has ended."""
        usage, timings = generation.usage, generation.timings
        if self._config.enable_metrics:
            self._recent.add_request(timings)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "request %s: %d prompt tokens, %d of them cached, %d new; waited %s, first token after %s, %s in all",
                generation.request_id, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens,
                _ms(timings.queue_s), _ms(timings.ttft_s), _ms(timings.latency_s),
            )  # fmt: skip

    def end(self, last: LoopStats) -> None:
        self._totals = last

    def snapshot(self, status: str, front: Front | None) -> dict[str, Any]:
        """The same keys whether or not the engine runs."""
        card = None if front is None else front.card
        state = LoopStats() if card is None or front is None else front.stats  # of what runs now
        totals = self._totals if card is None else state  # counted since the start
        stats: dict[str, Any] = {
            "engine_status": status,
            "model": None if card is None else _described(card),
            "memory_usage": state.kv_usage,
            "num_running": state.num_running,
            "num_waiting": state.num_waiting,
            "cache_info": {
                "num_entries": state.num_cached_blocks,
                "num_blocks": 0 if card is None else card.num_blocks,
                "block_size": self._config.block_size,
                "hit_rate": totals.prefix_hits / totals.prefix_queries if totals.prefix_queries else 0.0,
                "num_preemptions": totals.num_preemptions,
            },
            "speculation": {
                "drafts": totals.num_drafts,
                "draft_tokens": totals.draft_tokens,
                "accepted_tokens": totals.accepted_tokens,
            },
            "gpu": self._gpu_use(card),
            "performance_metrics": self._recent.metrics(),
        }
        if self._config.enable_metrics:
            stats["num_steps"] = totals.num_steps
            stats["prompt_tokens"], stats["generation_tokens"] = totals.prompt_tokens, totals.generation_tokens
        if self._config.profile_performance:
            stats["profile"] = profile(totals)
        if self._config.offloads_kv:
            stats["kv_tiers"] = {name: msgspec.structs.asdict(counts) for name, counts in totals.kv_tiers.items()}
        if self._config.tunes_itself:
            stats["adaptive"] = None if state.adaptive is None else msgspec.structs.asdict(state.adaptive)
        return stats

    def _gpu_use(self, card: ModelCard | None) -> dict[str, Any] | None:
        use = None if card is None else self._gpus.read(card.gpu)
        return None if use is None else use._asdict()


def _described(card: ModelCard) -> dict[str, Any]:
    """What runs, with what was left to the engine as it turned out."""
    return {
        "architecture": card.architecture, "device": card.device, "dtype": card.dtype, "kv_cache_dtype": card.kv_dtype,
        "load_s": card.load_s,
        "max_sequence_length": card.context_length, "max_batch_size": card.max_num_seqs,
        "max_num_batched_tokens": card.max_num_batched_tokens,
    }  # fmt: skip


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
