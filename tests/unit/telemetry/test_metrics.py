"""What is exported, under which names."""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.telemetry.test_gpu import GIB, OURS, Driver
from tonle.engine.kv.tiers.tier import TierCounts
from tonle.engine.messages import AdaptiveStats
from tonle.telemetry import metrics as metrics_module
from tonle.telemetry.fine_buckets import bucket_of
from tonle.telemetry.metrics import Metrics


@dataclass
class Stats:
    num_running: int = 1
    num_waiting: int = 2
    kv_usage: float = 0.5
    prefix_queries: int = 10
    prefix_hits: int = 4
    prefix_missed: dict[str, int] = field(default_factory=lambda: {"new": 5, "tail": 1})
    num_preemptions: int = 3
    num_steps: int = 5
    prompt_tokens: int = 6
    generation_tokens: int = 8
    adaptive: AdaptiveStats | None = None
    transfers: None = None
    running_adapters: list[str] = field(default_factory=list)
    waiting_adapters: list[str] = field(default_factory=list)
    num_drafts: int = 7
    draft_tokens: int = 30
    accepted_tokens: int = 20
    accepted_at: list[int] = field(default_factory=lambda: [12, 8])
    kv_tiers: dict[str, TierCounts] = field(default_factory=dict)
    kv_event_batches: int | None = None
    kv_event_batches_lost: int = 0


@dataclass
class Card:
    block_size: int = 16
    num_blocks: int = 100
    kv_dtype: str = "int8"
    gpu: str = ""
    max_loras: int = 0


@dataclass
class Engine:
    stats: Stats
    card: Card | None


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = metrics.render("")[0].decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset({"model_name": "m", **labels}.items())]


def test_engine_state_is_read_when_scraped() -> None:
    engine = Engine(Stats(), None)
    metrics = Metrics("m", engine)
    assert value(metrics, "vllm:num_requests_running") == 1
    assert value(metrics, "vllm:prompt_tokens_total") == 10, "computed and cached together"
    engine.stats = Stats(num_running=9)
    assert value(metrics, "vllm:num_requests_running") == 9
    assert value(metrics, "tonle:prefix_cache_missed_tokens_total", reason="new") == 5
    assert value(metrics, "tonle:prefix_cache_missed_tokens_total", reason="tail") == 1
    assert value(metrics, "vllm:spec_decode_num_drafts_total") == 7
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == 30
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 20
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1") == 8


def test_adaptive_tuning_is_exported_where_it_is_on() -> None:
    engine = Engine(Stats(), None)
    metrics = Metrics("m", engine)
    assert not [name for name, _ in samples(metrics) if "adaptive" in name]
    engine.stats = Stats(adaptive=AdaptiveStats(96, 0.5, 20, 50.0, None, num_changes=3, unreachable=["target_itl"]))
    assert value(metrics, "tonle:adaptive_max_num_batched_tokens") == 96
    assert value(metrics, "tonle:adaptive_prefill_share") == 0.5
    assert value(metrics, "tonle:adaptive_max_num_seqs") == 20
    assert value(metrics, "tonle:adaptive_target_itl_seconds") == 0.05
    assert value(metrics, "tonle:adaptive_changes_total") == 3
    assert value(metrics, "tonle:adaptive_target_unreachable") == 1
    assert not [name for name, _ in samples(metrics) if "ttft" in name and "adaptive" in name], "no such target"


def test_cache_shape_appears_with_the_engine() -> None:
    engine = Engine(Stats(), None)
    metrics = Metrics("m", engine)
    assert not any(name == "vllm:cache_config_info" for name, _ in samples(metrics))
    engine.card = Card()
    assert value(metrics, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100", cache_dtype="int8") == 1


def test_adapters_appear_where_they_are_enabled() -> None:
    engine = Engine(Stats(), Card())
    metrics = Metrics("m", engine)
    assert not any(name == "vllm:lora_requests_info" for name, _ in samples(metrics))
    engine.card = Card(max_loras=8)
    engine.stats.running_adapters = ["b", "a"]
    labels = {"max_lora": "8", "running_lora_adapters": "a,b", "waiting_lora_adapters": ""}
    assert samples(metrics)["vllm:lora_requests_info", frozenset(labels.items())] > 1e9


def test_the_use_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Stats(), Card())
    metrics = Metrics("m", engine)
    assert not any(name.startswith("tonle:gpu") for name, _ in samples(metrics)), "it runs on a CPU"
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    engine.card = Card(gpu=OURS)
    assert value(metrics, "tonle:gpu_utilization") == 0.93
    assert value(metrics, "tonle:gpu_memory_used_bytes") == 10 * GIB
    assert value(metrics, "tonle:gpu_memory_total_bytes") == 80 * GIB
    assert driver.num_asked == 1
    engine.card = Card(gpu="part")
    assert value(metrics, "tonle:gpu_memory_used_bytes") == 10 * GIB
    assert not any(name == "tonle:gpu_utilization" for name, _ in samples(metrics)), "the driver does not tell"


def test_reasons_have_vllms_names() -> None:
    metrics = Metrics("m", Engine(Stats(), None))
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 0, "there before the first event"
    metrics.count_finished("cancelled")
    metrics.count_finished("length")
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1


def test_histograms() -> None:
    metrics = Metrics("m", Engine(Stats(), None))
    metrics.ttft.observe(0.2)
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.1") == 0
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.25") == 1


def test_two_servers_do_not_share() -> None:
    one, two = Metrics("m", Engine(Stats(), None)), Metrics("m", Engine(Stats(), None))
    one.ttft.observe(1)
    assert value(two, "vllm:time_to_first_token_seconds_count") == 0


def test_fine_buckets_leave_the_histogram_of_gaps_as_it_was() -> None:
    """Against one that is observed value by value; bounds belong to the bucket below them."""
    metrics, bounds = Metrics("m", Engine(Stats(), None)), metrics_module._TOKEN_S
    plain = Histogram("plain", "help", registry=CollectorRegistry(), buckets=bounds)
    gaps = [
        *bounds,
        *(bound * 1.0001 for bound in bounds),
        *(bound * 0.9999 for bound in bounds),
        0.0,
        1e-7,
        0.0123,
        99.0,
        500.0,
    ]
    for number, gap_s in enumerate(gaps):
        metrics.itl.add(gap_s, 2)
        plain.observe(gap_s)
        plain.observe(gap_s)
        if number % 7 == 0:
            metrics.itl.flush()
    metrics.itl.flush()
    metrics.itl.flush()
    for sample in next(iter(plain.collect())).samples:
        if not sample.name.endswith("_created"):
            name = sample.name.replace("plain", "vllm:inter_token_latency_seconds")
            assert value(metrics, name, **sample.labels) == pytest.approx(sample.value), sample
    assert sum(metrics.itl.counts) == 2 * len(gaps)
    for gap_s in gaps[:-1]:
        place = bisect_left(metrics.itl._bounds, gap_s)
        if gap_s > 1e-4:
            assert abs(metrics.itl.buckets[place] - bucket_of(gap_s)) <= (gap_s in bounds), (
                "a bound may lie between two"
            )
