"""Spells of a shared machine are left out of a profile; what the fit misses as a whole is not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tonle.engine.schedule.step_facts import StepWork
from tonle.simulate.fit_times import TimedStep, fit_times
from tonle.simulate.fitted_times import FittedTimes
from tonle.simulate.pace import Span
from tonle.simulate.spells import kind_of, outside, undisturbed

ROWS_S, TOKEN_S = 0.01, 0.001


def _true_s(work: StepWork) -> float:
    return ROWS_S + 0.001 * work.rows + TOKEN_S * work.tokens


def _steps(
    seconds: float, slow: tuple[float, float] = (0.0, 0.0), factor: float = 1.4, scatter: float = 0.02
) -> list[TimedStep]:
    """Of all kinds in turn, as passes of a profile send them; from `slow[0]` to `slow[1]` each takes `factor` as long."""
    rng, now, steps = random.Random(7), 0.0, []
    while now < seconds:
        rows = rng.choice((1, 2, 4, 8))
        work = StepWork(rows, 1, 64, 0, 0, rows) if rng.random() < 0.2 else StepWork(rows, 0, 0, 0, 0, rows)
        took = _true_s(work) * rng.uniform(1 - scatter, 1 + scatter) * (factor if slow[0] <= now < slow[1] else 1.0)
        steps.append(TimedStep(work, now, took, 1e-4))
        now += took
    return steps


def _stages(steps: list[TimedStep]) -> list[int]:
    """Three loads, one after the other, again and again."""
    return [int(step.begin_s / 3.0) % 3 for step in steps]


def _left(steps: list[TimedStep], fitted_to: list[TimedStep] | None = None) -> list[TimedStep]:
    return undisturbed(steps, _fitted(fitted_to or steps), _stages(steps))


def _fitted(steps: list[TimedStep]) -> FittedTimes:
    return fit_times(steps, lag=0, sizes={})


def test_a_slow_spell_is_left_out_and_the_mean_of_times_is_that_of_the_rest() -> None:
    steps = _steps(60.0, slow=(10.0, 26.0))
    left = _left(steps)
    assert all(step.begin_s < 11.1 or step.begin_s >= 24.9 for step in left), "steps of the spell are still there"
    assert sum(step.begin_s < 10.0 or step.begin_s >= 26.0 for step in left) >= 0.95 * sum(
        step.begin_s < 10.0 or step.begin_s >= 26.0 for step in steps
    )
    times = _fitted(left)
    assert sum(times.ratios) / len(times.ratios) == pytest.approx(1.0, abs=0.01)
    assert times.device_s(StepWork(4, 0, 0, 0, 0, 4)) == pytest.approx(0.014, rel=0.03)


def test_a_spell_that_only_steps_with_prompts_notice_is_left_out_of_those_alone() -> None:
    """Few rows wait for memory, whatever others compute."""
    steps = [
        step if step.work.prompts else TimedStep(step.work, step.begin_s, _true_s(step.work), step.host_s)
        for step in _steps(90.0, slow=(20.0, 45.0), factor=1.6)
    ]
    left = _left(steps)
    assert [s for s in left if not s.work.prompts] == [s for s in steps if not s.work.prompts]
    assert not [s for s in left if s.work.prompts and 22.0 <= s.begin_s < 43.0]
    calm = [s for s in steps if s.work.prompts and not 18.0 <= s.begin_s < 47.0]
    assert set(calm) <= set(left)


def test_steps_of_the_time_in_which_the_machine_was_slow_are_left_out() -> None:
    steps = _steps(60.0)
    spans = [Span(10.0, 10.25, is_slow=True), Span(10.25, 10.5, is_slow=True), Span(30.0, 30.25, is_slow=True)]
    left = outside(steps, spans)
    assert 0 < len(steps) - len(left) < 100

    def ends_s(step: TimedStep) -> float:
        return step.begin_s + (step.device_s or 0.0)

    assert all(ends_s(step) <= 10.001 or step.begin_s >= 10.5 for step in left if step.begin_s < 20.0)
    gone = set(steps) - set(left)
    assert all(ends_s(step) + 1e-3 > 10.0 and step.begin_s < 30.25 for step in gone)
    assert outside(steps, []) == steps
    assert outside(steps, [Span(0.0, 50.0, is_slow=True)]) == steps, "a machine that is slow for most of the time"


def test_steps_with_prompts_are_not_all_left_out_though_the_others_are_enough() -> None:
    """Prompts would cost nothing in a simulation."""
    steps = _steps(60.0)
    slow = [
        Span(step.begin_s, step.begin_s + (step.device_s or 0.0), is_slow=True) for step in steps if step.work.prompts
    ]
    left = outside(steps, slow)
    assert [s for s in left if s.work.prompts] == [s for s in steps if s.work.prompts]
    assert _fitted(left).device_s(StepWork(2, 1, 64, 0, 0, 3)) == pytest.approx(0.076, rel=0.05)


def test_steps_of_a_spell_that_were_timed_together_are_left_out_with_it() -> None:
    """As on a GPU, where the host reads a step late while it launches a large one: the two are fitted by their sum."""
    steps = _steps(60.0, slow=(10.0, 26.0))
    for place in range(1, len(steps), 3):
        one, other = steps[place - 1 : place + 1]
        steps[place - 1] = replace(one, device_s=None)
        steps[place] = replace(
            other, device_s=None, run=(one.work, other.work), run_s=(one.device_s or 0.0) + (other.device_s or 0.0)
        )
    left = _left(steps)
    assert all(step.begin_s < 12.0 or step.begin_s >= 24.0 for step in left), "steps of the spell are still there"
    assert sum(bool(step.run) for step in left) > 0.6 * sum(bool(step.run) for step in steps)


def test_a_machine_of_its_own_has_none() -> None:
    steps = _steps(40.0)
    assert _left(steps) == steps


def test_steps_that_scatter_and_single_ones_that_were_held_up_stay() -> None:
    """Left out, the mean of the others would be too low."""
    steps = _steps(120.0, scatter=0.25)
    held_up = [
        TimedStep(s.work, s.begin_s, 4 * (s.device_s or 0.0), s.host_s) if place % 20 == 0 else s
        for place, s in enumerate(steps)
    ]
    left = _left(held_up)
    assert len(left) > 0.98 * len(held_up)


def test_a_kind_of_steps_that_the_fit_misses_is_no_spell() -> None:
    steps = _steps(40.0)
    wrong = [TimedStep(s.work, s.begin_s, 3 * (s.device_s or 0.0), s.host_s) if s.work.prompts else s for s in steps]
    assert _left(wrong, steps) == wrong


def test_a_load_that_the_fit_misses_is_no_spell() -> None:
    """Such as long contexts, which only one of the loads has."""
    steps = _steps(40.0)
    stages = _stages(steps)
    wrong = [
        TimedStep(s.work, s.begin_s, (1.3 if stage == 2 else 1.0) * (s.device_s or 0.0), s.host_s)
        for s, stage in zip(steps, stages, strict=True)
    ]
    assert undisturbed(wrong, _fitted(steps), stages) == wrong


def test_a_profile_too_short_to_leave_anything_out_keeps_all() -> None:
    steps = _steps(12.0, slow=(2.0, 11.0))
    slow = [s for s in steps if 2.0 <= s.begin_s < 11.0][::8]
    few = sorted([s for s in steps if not 2.0 <= s.begin_s < 11.0][:50] + slow, key=lambda s: s.begin_s)
    assert len(_left(few, steps)) == len(few)


def test_a_machine_that_is_slow_for_most_of_the_time_is_a_slow_machine() -> None:
    steps = _steps(60.0, slow=(10.0, 60.0))
    left = _left(steps)
    assert len([step for step in left if step.begin_s > 12.0]) >= 0.95 * len([s for s in steps if s.begin_s > 12.0])


def test_few_steps_tell_nothing() -> None:
    steps = _steps(3.0, slow=(2.0, 3.0))
    assert _left(steps) == steps


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (StepWork(1, 0, 0, 0, 0, 1), "decode,   1 rows"),
        (StepWork(5, 0, 0, 0, 0, 5), "decode,   5 to 8 rows"),
        (StepWork(0, 1, 9, 0, 0, 1), "prompts alone"),
        (StepWork(2, 1, 9, 0, 0, 3), "prompts beside rows"),
    ],
)
def test_kinds(work: StepWork, kind: str) -> None:
    assert kind_of(TimedStep(work, 0.0, 0.1, 0.0)) == kind
