"""What fits: by hand, and in which direction it moves."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.advise.cases import CHAT, LONG_MIX, times
from tonle.advise.capacity import RESERVE_BYTES, Capacity, capacity_of
from tonle.advise.roofline import RooflineTimes
from tonle.advise.units import GIB
from tonle.advise.workload import Workload
from tonle.bench import Span
from tonle.errors import ConfigError


def test_int4_on_one_h100_by_hand() -> None:
    workload = Workload.of_spans(Span(3500, 3500), Span(1000, 1000))
    found = capacity_of(times(precision="int4"), workload)
    usable = int(79 * GIB * 0.9) - RESERVE_BYTES
    assert found.usable_bytes == usable
    assert found.weight_bytes == times().shape.weight_bytes(times(precision="int4").precision)
    assert found.kv_tokens == (usable - found.weight_bytes) // 327_680 // 16 * 16
    assert workload.held_mean == 3500 + 500
    assert found.users_mean == found.kv_tokens // 4000
    assert found.users_p95 == found.kv_tokens // 4500
    assert found.users_safe <= found.users_mean


def test_gpus_beyond_the_kv_heads_hold_copies() -> None:
    workload = Workload.of_spans(Span(100, 100), Span(100, 100))
    two, four = (capacity_of(times("qwen2.5-1.5b", gpus=gpus), workload) for gpus in (2, 4))  # 2 KV heads
    assert two.kv_bytes_per_token == 28_672
    assert four.kv_bytes_per_token == 2 * 28_672


def test_a_shared_prefix_is_held_once() -> None:
    alone = Workload.of_spans(Span(1100, 1100), Span(100, 100))
    shared = Workload.of_spans(Span(100, 100), Span(100, 100), shared_prefix=1000)
    assert shared.mean_prompt == alone.mean_prompt
    assert shared.held_mean == alone.held_mean - 1000
    assert (
        capacity_of(times(precision="int4"), shared).users_mean
        > 5 * capacity_of(times(precision="int4"), alone).users_mean
    )


def test_what_running_requests_hold_is_what_a_walk_through_them_finds() -> None:
    """Requests one after the other, looked at after every token: long answers are seen more often."""
    workload = Workload.of_spans(*LONG_MIX)
    held = [prompt + done for prompt, answer in workload.lengths[:300] for done in range(answer)]
    assert workload.held_mean == pytest.approx(sum(held) / len(held), rel=0.05)


def test_safe_users_fit_in_95_of_100_moments() -> None:
    workload = Workload.of_spans(*LONG_MIX)
    found = capacity_of(times(precision="fp8", gpus=2), workload)
    rng, moments = random.Random(1), 2000
    weights = [answer for _, answer in workload.lengths]
    fits = 0
    for _ in range(moments):
        running = rng.choices(workload.lengths, weights, k=found.users_safe)
        fits += sum(prompt + rng.random() * answer for prompt, answer in running) <= found.kv_tokens
    assert fits / moments == pytest.approx(0.95, abs=0.03)


spans = st.tuples(st.integers(1, 5000), st.integers(0, 5000)).map(lambda pair: Span(pair[0], pair[0] + pair[1]))


def users(capacity: Capacity) -> tuple[int, int, int]:
    return capacity.users_mean, capacity.users_p95, capacity.users_safe


@given(prompts=spans, answers=spans, factor=st.floats(1.0, 4.0), gpus=st.sampled_from([1, 2, 4]))
def test_more_memory_never_fewer_users(prompts: Span, answers: Span, factor: float, gpus: int) -> None:
    before = times(precision="int4", gpus=gpus)
    larger = msgspec.structs.replace(before.gpu, memory_bytes=int(before.gpu.memory_bytes * factor))
    workload = Workload.of_spans(prompts, answers)
    less = users(capacity_of(before, workload))
    more = users(capacity_of(msgspec.structs.replace(before, gpu=larger), workload))
    assert all(left <= right for left, right in zip(less, more, strict=True))


@given(prompts=spans, answers=spans, longer=st.integers(0, 3000))
def test_longer_prompts_never_more_users(prompts: Span, answers: Span, longer: int) -> None:
    one = times(precision="int4")
    short = capacity_of(one, Workload.of_spans(prompts, answers))
    long = capacity_of(one, Workload.of_spans(Span(prompts.low + longer, prompts.high + longer), answers))
    assert all(left >= right for left, right in zip(users(short), users(long), strict=True))


@given(gpus=st.sampled_from([1, 2, 4, 8]), model=st.sampled_from(["llama-3.1-70b", "qwen2.5-7b", "mixtral-8x7b"]))
def test_lower_precision_never_fewer_tokens(gpus: int, model: str) -> None:
    workload = Workload.of_spans(*CHAT)

    def tokens(changed: RooflineTimes) -> int:
        return capacity_of(changed, workload).kv_tokens

    by_weights = [tokens(times(model, precision=name, gpus=gpus)) for name in ("bf16", "fp8", "int4")]
    assert by_weights == sorted(by_weights)
    assert tokens(times(model, gpus=gpus, precision="int4", kv="fp8")) >= 1.99 * by_weights[-1] - 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"users": 0}, "--concurrency must be at least 1"),
        ({"rate": 0.0}, "--rate must be more than 0"),
        ({"rate": float("inf")}, "--rate must be more than 0"),
        ({"users": 1, "rate": 1.0}, "not both"),
        ({"shared_prefix": -1}, "at least 0"),
    ],
)
def test_loads_that_make_no_sense_are_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Workload.of_spans(Span(10, 10), Span(10, 10), **changes)  # type: ignore[arg-type]


def test_lengths_that_make_no_sense_are_refused() -> None:
    for prompts, answers, words in (
        (Span(0, 5), Span(1, 1), "--input-tokens"),
        (Span(1, 1), Span(9, 2), "--output-tokens"),
    ):
        with pytest.raises(ConfigError, match=words):
            Workload.of_spans(prompts, answers)


def test_length_classes_share_the_load() -> None:
    classes = Workload.of_spans(*LONG_MIX, rate=4.0).classes()
    assert classes is not None
    short, long = classes
    assert (short.prompts[-1], long.prompts[0]) == (pytest.approx(5000, abs=50), pytest.approx(5000, abs=50))
    assert short.prompts[-1] < 5000 <= long.prompts[0]
    assert (short.rate or 0) + (long.rate or 0) == pytest.approx(4.0)
    assert short.rate == pytest.approx(4.0 * 4 / 19, rel=0.1)
    assert Workload.of_spans(*CHAT).classes() is None
