"""Steps of many sequences look for guesses where that was measured to pay, and nearly never where it was not."""

from __future__ import annotations

import random

import pytest

from tonle.engine.speculate.look_gain import LookGain


def run(gain: LookGain, steps: int, *, brings: float, takes: float, seed: int = 0, rows: int = 16) -> tuple[int, float]:
    """Steps of 9 ms on a busy machine; a look brings so many tokens and makes a step so many times as long. Steps with a look,
    and tokens per second to those that there were without any look."""
    rng, num_looked, seconds, plain_s, tokens = random.Random(seed), 0, 0.0, 0.0, 0
    num_plain = rows * steps
    for _ in range(steps):
        looked = gain.looks(rows)
        step_s = 0.009 * rng.uniform(0.93, 1.07) * (rng.choice([1.5, 3.0]) if rng.random() < 0.03 else 1.0)
        plain_s += step_s
        step_s *= takes if looked else 1.0
        accepted = 0
        if looked:
            accepted = int(brings) + (rng.random() < brings % 1)
        gain.learn(rows, looked=looked, tokens=rows + accepted, seconds=step_s)
        num_looked += looked
        tokens += rows + accepted
        seconds += step_s
    return num_looked, tokens / seconds * plain_s / num_plain


@pytest.mark.parametrize("seed", range(5))
def test_looks_that_bring_nothing_stop(seed: int) -> None:
    num_looked, gained = run(LookGain(), 4000, brings=0.0, takes=1.04, seed=seed)
    assert 0 < num_looked < 600
    assert gained > 0.99


@pytest.mark.parametrize("seed", range(5))
def test_looks_that_pay_go_on(seed: int) -> None:
    num_looked, gained = run(LookGain(), 4000, brings=3.0, takes=1.06, seed=seed)
    assert num_looked > 3000
    assert gained > 1.07


@pytest.mark.parametrize("seed", range(5))
def test_a_small_gain_is_one_on_a_machine_that_holds_steps_up(seed: int) -> None:
    num_looked, gained = run(LookGain(), 8000, brings=1.2, takes=1.01, seed=seed)
    assert num_looked > 6000
    assert gained > 1.03


def test_looks_stop_where_numbers_of_sequences_jump_too() -> None:
    gain, rng, num_looked = LookGain(), random.Random(2), 0
    for brings, takes in ((3.0, 1.02), (0.0, 1.05)):  # it pays, and then no more
        num_looked, rows = 0, 16
        for _ in range(6000):
            rows = rng.randrange(16, 32) if rng.random() < 0.1 else rows
            looked = gain.looks(rows)
            num_looked += looked
            gain.learn(
                rows, looked=looked, tokens=rows + int(brings * looked), seconds=0.009 * (takes if looked else 1.0)
            )
    assert num_looked < 1500


def test_steps_of_a_batch_that_grows_are_not_compared_with_smaller_ones() -> None:
    """The more sequences, the more tokens per second: with looks first, each growing batch seemed to gain without them."""
    gain, num_looked = LookGain(), 0
    for step in range(8000):
        rows = 16 + step % 15
        looked = gain.looks(rows)
        num_looked += looked
        gain.learn(rows, looked=looked, tokens=rows + 2 * looked, seconds=0.009 * (1.02 if looked else 1.0))
    assert num_looked > 5000


@pytest.mark.parametrize("every", [1, 2, 4])
def test_what_a_shrinking_batch_loses_is_not_what_looks_gain(every: int) -> None:
    """Fewer sequences, fewer tokens per second: whichever step of a pair came first would seem to be the better one."""
    gain, rng, num_looked = LookGain(), random.Random(3), 0
    for step in range(4000):
        rows = 15 - step // every % 8
        looked = gain.looks(rows)
        num_looked += looked
        step_s = (0.010 + 0.0004 * rows) * rng.gauss(1, 0.02) * (1.01 if looked else 1.0)
        gain.learn(rows, looked=looked, tokens=rows, seconds=step_s)
    assert num_looked < 1000


def test_numbers_of_sequences_that_jump_in_each_step_end_a_trial() -> None:
    gain, num_looked = LookGain(), 0
    for step in range(4000):
        rows = 16 + step % 2 * 8
        looked = gain.looks(rows)
        num_looked += looked
        gain.learn(rows, looked=looked, tokens=rows, seconds=0.009)
    assert num_looked < 1200


def test_it_pays_once_it_is_shown() -> None:
    gain = LookGain()
    assert gain.looks(16) and not gain.pays(16)
    run(gain, 500, brings=3.0, takes=1.06)
    assert gain.pays(16)
    run(gain, 2000, brings=0.0, takes=1.06)
    assert not gain.pays(16)


def test_sizes_near_one_where_looking_does_not_pay_begin_with_a_rest() -> None:
    gain = LookGain()
    run(gain, 40, brings=0.0, takes=1.1, rows=16)
    assert not gain.looks(16)
    assert not gain.looks(15)


def test_what_pays_is_found_out_again_when_the_work_changes() -> None:
    gain = LookGain()
    run(gain, 3000, brings=0.0, takes=1.05)
    num_looked, _ = run(gain, 1000, brings=6.0, takes=1.1)
    assert num_looked > 500
    num_looked, _ = run(gain, 1000, brings=0.0, takes=1.05)
    assert num_looked < 450


def test_numbers_of_sequences_are_apart() -> None:
    gain = LookGain()
    run(gain, 500, brings=0.0, takes=1.1, rows=16)
    few, _ = run(gain, 500, brings=3.0, takes=1.0, rows=8)
    assert few > 350


def test_a_step_that_found_no_guess_worth_making_is_one_without_a_look() -> None:
    gain = LookGain()
    for _ in range(1000):
        gain.learn(16, looked=False, tokens=16, seconds=0.009)
    assert gain.looks(16), "nothing was tried"


def test_a_clock_that_stands_still_is_no_measurement() -> None:
    gain = LookGain()
    for looked in (True, False) * 20:
        gain.learn(16, looked=looked, tokens=16, seconds=0.0)
    assert gain.looks(16)
