"""Step times from data sheets: parts by hand, measured steps of an H200, and what must never get slower."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.advise.cases import times
from tonle.engine.schedule.step_facts import StepWork
from tonle.simulate.step_times import StepTimes

# Steps measured on an H200, from docs/performance.md: rows, context, tokens of a prompt, milliseconds.
MEASURED: list[tuple[str, int, int, int, float]] = [
    ("qwen2.5-1.5b", 1, 400, 0, 0.98),
    ("qwen2.5-1.5b", 8, 400, 0, 1.37),
    ("qwen2.5-1.5b", 32, 400, 0, 1.70),
    ("qwen2.5-1.5b", 100, 400, 0, 2.03),
    ("qwen2.5-1.5b", 256, 400, 0, 2.88),
    ("qwen2.5-1.5b", 0, 0, 512, 3.19),
    ("qwen2.5-1.5b", 100, 400, 256, 3.07),
    ("llama-3.2-3b", 1, 400, 0, 1.71),
    ("llama-3.2-3b", 8, 400, 0, 2.30),
    ("llama-3.2-3b", 100, 400, 0, 3.56),
    ("llama-3.2-3b", 256, 400, 0, 5.80),
    ("llama-3.2-3b", 0, 0, 4096, 46.2),
    ("llama-2-7b", 1, 400, 0, 3.88),
]


def predicted_ms(model: str, rows: int, context: int, prompt: int) -> float:
    found = times(model, "H200")
    return 1e3 * (found.mixed_s(rows, context, prompt, 0) if rows else found.prompt_s(prompt, prompt))


def test_measured_steps_are_met_within_15_percent() -> None:
    ratios = [predicted_ms(*step) / ms for *step, ms in MEASURED]
    assert all(0.85 < ratio < 1.15 for ratio in ratios), ratios
    assert math.exp(math.fsum(abs(math.log(ratio)) for ratio in ratios) / len(ratios)) < 1.07


def test_parts_of_a_step_by_hand() -> None:
    one = times("llama-3.1-70b", "H100", "fp8", gpus=2)
    blocks, head = 80 * 855_654_400, 128_256 * 8192
    assert one.shape.block_parameters == pytest.approx(blocks, rel=1e-4)
    assert one.read_weights_s() == pytest.approx((blocks + 2 * head) / (2 * 3.35e12 * 0.88), rel=1e-4)
    assert one.multiply_s(1000, 10) == pytest.approx(
        (2 * blocks * 1000 / 1979e12 + 2 * head * 10 / 989e12) / (2 * 0.7), rel=1e-4
    )
    assert one.read_kv_s(10_000) == pytest.approx(10_000 * 327_680 / (2 * 3.35e12 * 0.88))
    assert one.score_prompts_s(10**6) == pytest.approx(4 * 8192 * 80 * 10**6 / (2 * 989e12 * 0.33))
    # two per layer, half of the states each way twice, 16 bits
    assert one.all_reduce_s(100) == pytest.approx(2 * 80 * (10e-6 + 100 * 8192 * 2 / (450e9 * 0.75)))
    assert times().all_reduce_s(100) == 0.0


def test_kv_heads_beyond_their_number_save_no_reading() -> None:
    four, eight = (times("qwen2.5-72b", gpus=gpus).read_kv_s(1000) for gpus in (4, 8))
    assert eight == four / 2  # 8 KV heads
    two, four = (times("qwen2.5-1.5b", gpus=gpus).read_kv_s(1000) for gpus in (2, 4))
    assert two == four  # 2 KV heads


def test_it_is_what_the_simulator_asks_for() -> None:
    found: StepTimes = times("qwen2.5-1.5b", "H200")
    assert found.lag == 1
    assert found.device_s(StepWork(0, 0, 0, 0, 0, 0)) == 0.0
    assert 0 < found.host_s(StepWork(1, 0, 0, 0, 0, 1)) < found.host_s(StepWork(256, 1, 10, 0, 0, 256))
    assert min(found.front_s, found.back_s) > 0


def test_a_prompt_in_chunks_takes_no_less_than_in_one() -> None:
    found = times("llama-3.2-3b", "H200")
    whole, halves, small = (found.prompt_s(4096, chunk) for chunk in (4096, 2048, 256))
    assert whole < halves < small
    assert found.prompt_s(1000, 512, depth=10_000) > found.prompt_s(1000, 512)


works = st.builds(
    StepWork,
    rows=st.integers(0, 512),
    prompts=st.integers(0, 8),
    tokens=st.integers(0, 8192),
    decode_reads=st.integers(0, 10**6),
    prompt_reads=st.integers(0, 10**8),
    samples=st.integers(0, 512),
)
changes = st.sampled_from(["bandwidth", "bf16", "fp8", "link"])


@given(work=works, change=changes, factor=st.floats(1.0, 10.0), precision=st.sampled_from(["bf16", "fp8", "int4"]),
       gpus=st.sampled_from([1, 2, 8]))  # fmt: skip
def test_a_better_gpu_is_never_slower(work: StepWork, change: str, factor: float, precision: str, gpus: int) -> None:
    before = times(precision=precision, gpus=gpus)
    better: dict[str, Any] = {change: getattr(before.gpu, change) * factor}
    after = msgspec.structs.replace(before, gpu=msgspec.structs.replace(before.gpu, **better))
    assert after.device_s(work) <= before.device_s(work) * (1 + 1e-12)


@given(work=works, more=works, gpus=st.sampled_from([1, 4]))
def test_more_work_is_never_faster(work: StepWork, more: StepWork, gpus: int) -> None:
    found = times("mixtral-8x7b", gpus=gpus)
    total = StepWork(*(left + right for left, right in zip(work, more, strict=True)))
    assert found.device_s(total) >= found.device_s(work) * (1 - 1e-12)
