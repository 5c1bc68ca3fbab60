"""What is learnt about steps: their cost, by how much they exceed it, and how calmly a limit follows."""

from __future__ import annotations

import random

import pytest

from tonle.engine.schedule.lasting import Lasting
from tonle.engine.schedule.step_cost import Margin, StepCost, Work
from tonle.engine.schedule.tuned_value import TunedValue

TRUE_S = (0.006, 0.001, 0.0008, 1.5e-6)  # fixed, per row, per token, per read


def seconds(work: Work) -> float:
    fixed, row, token, read = TRUE_S
    return fixed + row * work.rows + token * work.tokens + read * work.reads


def steps(rng: random.Random, count: int) -> list[Work]:
    """Decoding mostly, and chunks of prompts at any depth."""
    works = []
    for _ in range(count):
        rows = rng.randint(1, 20)
        tokens = rng.choice([0, 0, 0, rng.randint(2, 200)])
        works.append(Work(rows, tokens, rows * rng.randint(50, 500) + tokens * rng.randint(0, 1500)))
    return works


@pytest.mark.parametrize(("noise", "hiccups", "within"), [(0.0, 0.0, 0.02), (0.1, 0.02, 0.25)])
def test_costs_are_found_among_noise(noise: float, hiccups: float, within: float) -> None:
    rng, cost = random.Random(5), StepCost(32, 512, 4096)
    for work in steps(rng, 1500):
        slow = 10 if rng.random() < hiccups else 1
        cost.learn(work, seconds(work) * (1 + noise * rng.uniform(-1, 1)) * slow)
    found = (cost.fixed_s, cost.per_row_s, cost.per_token_s, cost.per_read_s)
    assert found == pytest.approx(TRUE_S, rel=within, abs=0.002 * within)
    for work in steps(rng, 50):
        assert cost.expected_s(work) == pytest.approx(seconds(work), rel=within)


def test_a_long_time_of_decoding_does_not_undo_what_is_known_about_prompts() -> None:
    rng, cost = random.Random(5), StepCost(32, 512, 4096)
    for work in steps(rng, 800):
        cost.learn(work, seconds(work))
    for _ in range(20_000):
        cost.learn(Work(4, 0, 800), seconds(Work(4, 0, 800)) * rng.uniform(0.9, 1.1))
    prompt = Work(4, 200, 100_000)
    cost.learn(prompt, 10 * seconds(prompt))  # the machine was busy
    assert cost.expected_s(prompt) == pytest.approx(seconds(prompt), rel=0.1)


def test_all_is_forgotten_when_the_machine_has_become_much_faster() -> None:
    rng, cost = random.Random(5), StepCost(32, 512, 4096)
    for work in steps(rng, 200):
        assert not cost.learn(work, 5 * seconds(work))
    work = Work(20, 0, 8000)
    assert [cost.learn(work, seconds(work)) for _ in range(3)] == [False] * 3, "not yet"
    assert cost.learn(work, seconds(work))
    assert cost.num_steps == cost.num_prompt_steps == 0


def test_less_work_is_not_taken_for_a_faster_machine() -> None:
    """Whether the time goes into rows, tokens or reads, and however suddenly there are fewer of them."""
    works = [Work(20, 0, 60_000), Work(1, 0, 10), Work(8, 200, 400_000), Work(1, 3, 12), Work(1, 200, 20_000)]
    for fixed, row, token, read in ((0.0, 0.01, 0, 0), (0, 0, 0.01, 0), (0, 0, 0, 1e-5), TRUE_S):
        cost = StepCost(32, 512, 4096)
        for work in (work for work in works * 3 for _ in range(40)):
            took = fixed + row * work.rows + token * work.tokens + read * work.reads
            assert not cost.learn(work, max(took, 1e-6))


def test_no_coefficient_is_negative_whatever_is_measured() -> None:
    rng, cost = random.Random(5), StepCost(32, 512, 4096)
    for work in steps(rng, 500):
        cost.learn(work, rng.lognormvariate(-4, 3))
        assert min(cost.fixed_s, cost.per_row_s, cost.per_token_s, cost.per_read_s) >= 0
        assert cost.expected_s(work) < float("inf")


def test_a_margin_covers_99_of_100() -> None:
    rng, margin = random.Random(5), Margin()
    for _ in range(20_000):
        margin.learn(1.0, 1 + abs(rng.gauss(0, 0.1)))
    above = sum(1 + abs(rng.gauss(0, 0.1)) > margin.value for _ in range(10_000)) / 10_000
    assert 0.001 < above < 0.03


def test_a_value_is_cut_at_once_and_raised_after_a_while() -> None:
    value = TunedValue(1, 1000, 100)
    assert value.follow(50, now=0.0) and value.value == 50
    assert not value.follow(20, now=0.1), "steps planned before the cut still run"
    for step in range(20):
        assert not value.follow(400, now=0.2 + step * 0.03), "not yet"
    assert value.follow(400, now=1.3) and value.value == 62, "by a quarter"
    assert not value.follow(60, now=2.0) and not value.follow(58, now=3.0), "within the dead band"
    assert value.value == 62


def test_what_did_not_suit_once_within_the_wait_is_not_raised_to() -> None:
    value = TunedValue(1, 1000, 100)
    for step in range(20):
        assert not value.follow(105 if step == 5 else 400, now=step * 0.1)
    assert value.follow(400, now=2.05) and value.value == 200


def test_raises_that_are_taken_back_become_rare() -> None:
    """What suits turns out to be less as soon as the value has been raised to more than 100."""
    value, changes = TunedValue(1, 1000, 80), 0
    for step in range(100_000):
        changes += value.follow(90 if value.value > 100 else 130, now=step * 0.01)
    assert changes < 50, "in 1000 seconds"


def test_bounds_of_a_value() -> None:
    value = TunedValue(4, 64, 100)
    assert value.value == 64
    assert value.follow(-5.0, now=1.0) and value.value == 4
    for step in range(10_000):
        value.follow(1e9, now=2 + step * 0.1)
    assert value.value == 64


def test_something_lasts_once_it_has_gone_on() -> None:
    lasting = Lasting()
    assert [lasting.see(True, now) for now in (0.0, 4.0)] == [None, None]
    assert lasting.see(False, 4.5) is None and lasting.see(True, 5.0) is None, "interrupted"
    assert [lasting.see(True, now) for now in (9.9, 10.0, 11.0)] == [None, True, None]
    assert [lasting.see(False, now) for now in (12.0, 17.0, 18.0)] == [None, False, None]
