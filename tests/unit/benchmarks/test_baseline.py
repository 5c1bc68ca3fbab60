"""The naive way against ours: the arithmetic of the tables, and both sides on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.baseline import jobs_of, span
from benchmarks.baseline_sides import Naive, Ours, engine_config, transformers_model, word_tokenizer
from benchmarks.baseline_tables import (
    at_percentile,
    breakdown_rows,
    improvement,
    latency_row,
    mib,
    ratio,
    repeated_questions,
    seconds,
    waste,
)
from tests.fakes.checkpoints import save_folder

from tonle.engine import InferenceEngine
from tonle.models.source import resolve

POOL_BYTES = 2**22


def test_a_ratio_compares_runs_of_the_same_repeat() -> None:
    assert ratio([8.0, 40.0, 8.0], [4.0, 10.0, 2.0]) == 4.0  # the machine was busy in the second repeat
    assert ratio([10.0, 20.0], [30.0, 60.0], more_is_better=True) == 3.0


def test_an_improvement_says_when_it_is_none() -> None:
    assert (
        improvement(2.66, "faster", "slower") == "2.7x faster" and improvement(0.5, "faster", "slower") == "2.0x slower"
    )


@pytest.mark.parametrize("share", [0.0, 0.25, 0.4, 0.5])
def test_as_many_questions_as_stated_were_asked_before(share: float) -> None:
    asked = repeated_questions(20, share, str)
    assert len(asked) == 20 and 20 - len(set(asked)) == round(20 * share)
    assert max(asked.count(each) for each in asked) <= 2


def test_a_row_of_latencies() -> None:
    latencies = [0.1 * (place + 1) for place in range(100)]
    row = latency_row("plain", latencies, [place % 4 == 0 for place in range(100)])
    assert row == ("plain", "5.10 s", "9.50 s", "9.90 s", "25%")
    assert at_percentile([3.0, 1.0, 2.0], 50) == 2 and at_percentile([3.0, 1.0, 2.0], 95) == 0


def test_a_breakdown_adds_up() -> None:
    assert breakdown_rows({"Cache lookup": 0.01, "Generation": 0.99}) == [
        ("Total", "1.00 s", "100.0%"), ("Cache lookup", "10 ms", "1.0%"), ("Generation", "990 ms", "99.0%")]  # fmt: skip


def test_units() -> None:
    assert [seconds(value) for value in (0.00005, 0.0123, 2.5)] == ["50 µs", "12.3 ms", "2.50 s"]
    assert mib(3 * 2**20) == "3 MiB" and mib(3 * 2**30) == "3 GiB"
    assert waste(30, 40) == 0.25 and span("8-32") == (8, 32) and span("8") == (8, 8)


def test_both_sides_do_the_same_work_and_their_memory_is_counted(tmp_path: Path) -> None:
    save_folder("llama", tmp_path)
    source = resolve(tmp_path)
    naive = Naive(transformers_model(source, "cpu", torch.float32))
    vocab = naive.model.config.vocab_size
    jobs = [([token % vocab for token in prompt], count) for prompt, count in jobs_of(5, (4, 40), (2, 12), seed=1)]
    one, static = naive.run(jobs, 1), naive.run(jobs, 3)
    with InferenceEngine(source.path, word_tokenizer(vocab), engine_config("cpu", "auto", POOL_BYTES, 128)) as engine:
        ours = Ours(engine, POOL_BYTES)
        found, held = ours.run(jobs, "cpu"), ours.kv_peak_bytes(jobs[:3])
        num_blocks = engine.get_stats()["cache_info"]["num_blocks"]
    assert one.outputs == static.outputs == found.outputs
    assert [len(output) for output in found.outputs] == [count for _, count in jobs]
    best, ties, worst = naive.agreement(jobs, found.outputs)
    assert best == ties == sum(map(len, found.outputs)) and worst == 0
    wrong = [[(token + 1) % vocab for token in output] for output in found.outputs]
    assert naive.agreement(jobs, wrong)[1] < best / 2
    assert 0 < max(found.first_token_s) <= max(found.finished_s) <= found.seconds
    config = naive.model.config
    width = max(len(prompt) for prompt, _ in jobs[:3]) + max(count for _, count in jobs[:3]) - 1
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert naive.generate(jobs[:3])[2] == 3 * width * per_token
    blocks = sum(-(-(len(prompt) + count) // 16) for prompt, count in jobs[:3])
    assert 0 < held <= blocks * POOL_BYTES / num_blocks + 1
