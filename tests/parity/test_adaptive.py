"""Tokens are the same with adaptive tuning on: it cuts and delays work, and never changes it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tonle.config.engine import EngineConfig
from tonle.engine.loop import Loop
from tonle.engine.plan import Plan
from tonle.engine.request import GenerationConfig

MODEL = tiny_model("llama")
SAMPLED = GenerationConfig(max_length=40, seed=11, temperature=0.8, top_p=0.95, early_stopping=False)
GREEDY = GenerationConfig(max_length=40, do_sample=False, early_stopping=False)
IMPOSSIBLE_MS, EASY_MS = 0.001, 10_000.0


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 320) for _ in range(size)] for size in (5, 300, 40, 200, 1, 120, 17, 260)]


def driver(lag: int = 0, **settings: Any) -> Driver:
    return Driver(MODEL, EngineConfig(max_sequence_length=400, max_batch_size=6, **settings), lag=lag)


def shapes(loop: Loop) -> list[tuple[int, int]]:
    """Of the steps to come: rows and tokens."""
    seen: list[tuple[int, int]] = []
    launch = loop._runner.launch

    def look(plan: Plan) -> Any:
        seen.append((len(plan.rows), plan.num_tokens))
        return launch(plan)

    loop._runner.launch = look  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lag", [0, 1])
def test_tuned_tokens_are_the_same(lag: int, config: GenerationConfig) -> None:
    fixed = driver(lag)
    fixed_shapes = shapes(fixed.loop)
    expected = fixed.generate(prompts(), config, arrive_every=3)
    for target_ms in (IMPOSSIBLE_MS, EASY_MS):
        tuned = driver(lag, target_itl_ms=target_ms, target_ttft_ms=target_ms)
        tuned_shapes = shapes(tuned.loop)
        assert tuned.generate(prompts(), config, arrive_every=3) == expected
        assert tuned_shapes != fixed_shapes, "nothing was tuned"
    assert fixed.stats.adaptive is None and fixed.loop._scheduler.tuned is None


def test_an_impossible_target_gives_prompts_a_block_per_step_and_shows_in_the_statistics() -> None:
    own = driver(target_itl_ms=IMPOSSIBLE_MS)
    own.generate(prompts(), GREEDY, arrive_every=3)
    stats = own.stats.adaptive
    assert stats.max_num_batched_tokens == 16 == own.loop._scheduler.tuned.max_num_batched_tokens
    assert stats.num_changes >= 1 and stats.slow_share > 0.3 and stats.target_itl_ms == pytest.approx(IMPOSSIBLE_MS)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_that_fails_leaves_no_trace_in_the_controller(lag: int) -> None:
    own = driver(lag, target_itl_ms=EASY_MS)
    runner = own.loop._runner
    launch = runner.launch
    failures = iter([False] * 20 + [True])

    def launch_or_fail(plan: Plan) -> Any:
        if next(failures, False):
            raise RuntimeError("broken once")
        return launch(plan)

    runner.launch = launch_or_fail  # type: ignore[method-assign]
    assert own.generate(prompts(), GREEDY) == driver(lag).generate(prompts(), GREEDY)
    controller = own.loop._controller
    assert controller is not None and not controller._planned, "steps are taken for others from now on"


def test_a_cap_on_one_prompt_that_was_set_stays_a_cap() -> None:
    assert driver(target_itl_ms=1.0).loop._scheduler.limits.long_prefill_tokens == 512
    assert driver(target_itl_ms=1.0, long_prefill_token_threshold=64).loop._scheduler.limits.long_prefill_tokens == 64
    assert driver().loop._scheduler.limits.long_prefill_tokens == 256
