"""The fit of step times: known coefficients come back out of made-up steps, however they scatter."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from tonle.engine.schedule.step_facts import StepWork
from tonle.engine.step_log import LoggedStep
from tonle.errors import ConfigError
from tonle.simulate.fit_times import TimedStep, fit_times, timed_steps
from tonle.simulate.fitted_times import Curve, FittedTimes, scatter_kind
from tonle.simulate.median_fit import median_fit, non_negative_least_squares

MS = 1e-3
GRAPHS = {"decode": [1, 2, 4, 8, 16, 32], "mixed": [16, 64, 128, 256], "head": [1, 4, 16, 32]}


def truth(work: StepWork) -> float:
    """A device: weights to read, a bend at 16 tokens, more per token than per row."""
    if not work.prompts:
        return (5 + 0.1 * min(work.rows, 16) + 0.4 * max(0, work.rows - 16)) * MS + 2e-6 * work.decode_reads
    total = work.rows + work.tokens
    return (6 + 0.25 * total + 0.5 * work.prompts) * MS + 2e-6 * work.decode_reads + 1e-7 * work.prompt_reads


def padded_truth(work: StepWork) -> float:
    """The same where graphs pad steps up to 256 tokens."""

    def up(value: int, ladder: list[int]) -> int:
        return next((size for size in ladder if size >= value), value)

    if not work.prompts:
        return truth(work._replace(rows=up(work.rows, GRAPHS["decode"])))
    total = up(work.rows + work.tokens, GRAPHS["mixed"])
    return truth(work._replace(tokens=total - work.rows)) + 0.05 * MS * up(work.samples, GRAPHS["head"])


def some_work(rng: random.Random) -> StepWork:
    rows = rng.randint(1, 32)
    context = rng.randint(10, 600)
    if rng.random() < 0.7:
        return StepWork(rows, 0, 0, rows * context, 0, rows)
    rows = rng.choice([0, rows])
    prompts = rng.randint(1, 4)
    tokens = sum(rng.randint(2, 100) for _ in range(prompts))
    return StepWork(rows, prompts, tokens, rows * context, tokens * rng.randint(1, 500), rows + rng.randint(0, prompts))


def steps_of(device: object, count: int = 1500, *, scatter: bool = True) -> list[TimedStep]:
    rng = random.Random(1)
    steps = []
    for place in range(count):
        work = some_work(rng)
        seconds = device(work)  # type: ignore[operator]
        if scatter:
            seconds *= rng.gauss(1.0, 0.03) * (rng.uniform(2, 8) if rng.random() < 0.05 else 1.0)
        host_s = (0.2 + 0.01 * (work.rows + work.prompts) + 0.002 * work.tokens) * MS
        steps.append(TimedStep(work, float(place), seconds, host_s))
    return steps


@pytest.mark.parametrize(("device", "sizes"), [(truth, {}), (padded_truth, GRAPHS)])
def test_a_fit_finds_what_steps_cost_behind_noise_and_outliers(device: object, sizes: dict[str, list[int]]) -> None:
    times = fit_times(steps_of(device), lag=0, sizes=sizes)
    rng = random.Random(2)
    new = [some_work(rng) for _ in range(500)]
    errors = sorted(abs(times.device_s(work) / device(work) - 1) for work in new)  # type: ignore[operator]
    assert errors[len(errors) // 2] < 0.01
    assert errors[int(0.95 * len(errors))] < 0.05
    assert times.decode_read_s == pytest.approx(2e-6, rel=0.05)
    assert times.prompt_read_s == pytest.approx(1e-7, rel=0.2)
    assert times.host_s(StepWork(8, 2, 100, 0, 0, 8)) == pytest.approx(0.5 * MS, rel=0.02)


def test_exact_steps_are_told_exactly() -> None:
    steps = steps_of(truth, scatter=False)
    times = fit_times(steps, lag=1, sizes={})
    for step in steps:
        assert times.device_s(step.work) == pytest.approx(step.device_s, rel=0.01)
    assert times.ratios == pytest.approx([1.0] * len(times.ratios), rel=0.02)
    assert times.lag == 1


def test_padded_steps_cost_what_their_graph_costs() -> None:
    times = fit_times(steps_of(padded_truth), lag=1, sizes=GRAPHS)
    seventeen, thirty = (times.decode.at(rows) for rows in (17, 30))
    assert seventeen == thirty
    assert times.decode.at(16) < seventeen
    assert times.mixed.at(65) == times.mixed.at(128) < times.mixed.at(129)
    assert times.mixed.padded_to == 256
    assert times.mixed.at(300) < times.mixed.at(330), "beyond the graphs each token counts"


def test_the_scatter_keeps_the_sum_of_all_times_though_the_middle_ignores_outliers() -> None:
    steps = steps_of(truth)
    times = fit_times(steps, lag=0, sizes={})
    rng = random.Random(3)
    drawn = (
        sum(times.device_s(step.work) * times.jitter(step.work, rng.random()) for step in steps for _ in range(20)) / 20
    )
    measured = sum(step.device_s or 0.0 for step in steps)
    assert drawn == pytest.approx(measured, rel=0.03)
    prompts = StepWork(4, 1, 64, 0, 0, 4)
    assert times.jitter(prompts, 0.5) == pytest.approx(1.0, abs=0.01)
    assert times.jitter(prompts, 0.99) > 2
    assert all(low <= high for low, high in pairwise(times.ratios))


def test_each_kind_of_step_scatters_as_it_was_measured() -> None:
    """Short steps are held up for as long as long ones, so by a larger share of what they take."""
    rng, steps = random.Random(5), []
    for place in range(4000):
        one, many, prompts = StepWork(1, 0, 0, 9, 0, 1), StepWork(30, 0, 0, 99, 0, 30), StepWork(3, 1, 64, 9, 0, 3)
        work = (one, many, prompts)[place % 3] if place != 5 else StepWork(9, 0, 0, 9, 0, 9)
        seconds = truth(work) + (3 * MS if rng.random() < 0.25 else 0.0)
        steps.append(TimedStep(work, float(place), seconds, 1e-4))
    times = fit_times(steps, lag=0, sizes={})
    assert set(times.kind_ratios) == {0, 1, 32, scatter_kind(prompts)}, "one step alone has no scatter of its own"
    for work in (one, many, prompts):
        assert times.jitter(work, 0.9) == pytest.approx(1 + 3 * MS / truth(work), rel=0.02)
        assert times.mean_s(work) == pytest.approx(truth(work) + 0.75 * MS, rel=0.02)
    assert times.jitter(StepWork(9, 0, 0, 9, 0, 9), 0.9) in times.ratios


def with_prompts(num_alone: int, num_beside: int) -> list[TimedStep]:
    """Prompts alone take what is expected; each fourth one beside rows takes half as long again."""
    steps = []
    for place in range(num_alone + num_beside):
        is_alone = place < num_alone
        tokens = 32 + 32 * (place % 8)
        work = StepWork(0, 1, tokens, 0, 0, 1) if is_alone else StepWork(4, 1, tokens, 0, 0, 5)
        steps.append(
            TimedStep(work, float(place), truth(work) * (1.5 if not is_alone and place % 4 == 0 else 1.0), 1e-4)
        )
    return steps


def test_prompts_alone_do_not_scatter_as_those_beside_rows() -> None:
    """One user's prompts are alone: the slowest twentieth of its first tokens would come too late."""
    steps = with_prompts(60, 400)
    times = fit_times(steps, lag=0, sizes={})
    alone, beside = StepWork(0, 1, 96, 0, 0, 1), StepWork(4, 1, 96, 0, 0, 5)
    assert times.jitter(alone, 0.95) < 1.05
    assert times.jitter(beside, 0.95) == pytest.approx(1.5, abs=0.05)
    for own in (steps[:60], steps[60:]):
        measured = sum(step.device_s or 0.0 for step in own)
        assert sum(times.mean_s(step.work) for step in own) == pytest.approx(measured, rel=0.01)


def test_too_few_prompts_alone_scatter_as_all_steps_with_prompts() -> None:
    """So do all in older profiles, which tell no two kinds apart."""
    times = fit_times(with_prompts(20, 400), lag=0, sizes={})
    alone, beside = StepWork(0, 1, 96, 0, 0, 1), StepWork(4, 1, 96, 0, 0, 5)
    assert times.jitter(alone, 0.95) in times.kind_ratios[0]
    older = msgspec.structs.replace(times, kind_ratios={0: [1.25], 1: [1.0]}, ratios=[2.0])
    assert older.jitter(alone, 0.5) == older.jitter(beside, 0.5) == 1.25


def test_too_few_steps_are_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="only 20 steps could be timed"):
        fit_times(steps_of(truth, 20), lag=0, sizes={})


def test_a_curve_goes_on_beyond_what_was_measured() -> None:
    curve = Curve([1, 10, 20], [1.0, 2.0, 4.0])
    assert [curve.at(size) for size in (0, 1, 10, 15, 20)] == [1.0, 1.0, 2.0, 3.0, 4.0]
    assert curve.at(30) == pytest.approx(6.0)
    assert Curve([4], [1.0]).at(8) == pytest.approx(2.0)


def test_without_a_scatter_steps_take_what_is_expected() -> None:
    flat = Curve([1], [1.0])
    times = FittedTimes(
        lag=0, front_s=0.0, back_s=0.0, decode=flat, mixed=flat, draw=Curve([0], [0.0]), chunk_s=0.0, decode_read_s=0.0,
        prompt_read_s=0.0, host_step_s=0.0, host_row_s=0.0, host_token_s=0.0,
    )  # fmt: skip
    work = StepWork(1, 0, 0, 9, 0, 1)
    assert times.jitter(work, 0.0) == times.jitter(work, 0.999) == 1.0


def logged(
    planned: float, launching: float, launched: float, waited: float, collected: float, published: float
) -> LoggedStep:
    return LoggedStep(planned, launching, launched, waited, collected, published, 1, 0, 0, 5, 0, 1, 1, 0)


def test_without_lag_the_device_computes_in_the_launch() -> None:
    steps = [logged(0.0, 1.0, 9.0, 9.0, 9.5, 10.0), logged(10.5, 11.0, 19.0, 19.0, 19.5, 20.0)]
    first, last = timed_steps(steps, 0)
    assert first.device_s == 8.5
    assert first.host_s == 1.0 + 0.5 + 0.5, "planning, publishing, and the mail before the next plan"
    assert last.device_s == 8.5
    assert last.host_s is None, "what came after is not known"


def test_with_lag_a_step_begins_when_the_one_ahead_ends() -> None:
    steps = [
        logged(0.0, 1.0, 2.0, 5.0, 10.0, 11.0),
        logged(3.0, 4.0, 5.0, 14.0, 22.0, 23.0),
        logged(11.5, 12.5, 13.5, 23.0, 23.0, 24.0),  # the host was late: nothing is known of the device
    ]
    first, second, third = timed_steps(steps, 1)
    assert first.device_s == 8.0
    assert second.device_s == 12.0
    assert third.device_s is None
    assert first.host_s == 2.0 + 1.0 + 0.5
    assert (second.host_s, third.host_s) == (None, None)


def test_the_host_launches_what_is_no_graph_while_the_device_computes() -> None:
    """Kernel by kernel, for ten seconds longer than one call takes; the device began when the first was launched."""
    call = [logged(0.0, 0.5, 1.0, 5.0, 10.0, 11.0)]
    large = LoggedStep(11.5, 12.0, 22.5, 23.0, 40.0, 41.0, 0, 1, 2000, 0, 10, 1, 1, 0)
    later = [logged(42.0, 42.5, 43.0, 44.0, 50.0, 51.0), logged(52.0, 52.5, 53.0, 54.0, 60.0, 61.0)]
    timed = timed_steps([*call, large, *later], 1)[1]
    assert (timed.device_s, timed.launch_s) == (27.5, 10.0)
    assert timed.host_s == 1.0 + 1.0 + 11.0, "until the first call, publishing, and until the plan after the next"

    steps = [
        replace(step, launch_s=0.015 if step.work.rows + step.work.tokens > 256 else 0.0)
        for step in steps_of(padded_truth)
    ]
    times = fit_times(steps, lag=1, sizes=GRAPHS)
    assert times.launching_s(StepWork(0, 1, 2000, 0, 10, 1)) == pytest.approx(0.015, rel=0.01)
    assert times.launching_s(StepWork(6, 1, 250, 0, 10, 1)) == 0.0
    assert times.launching_s(StepWork(256, 0, 0, 0, 0, 256)) == 0.0


def test_least_squares_never_go_below_zero() -> None:
    rng = np.random.default_rng(0)
    columns = rng.random((200, 6))
    true = np.array([1.0, 0.0, 2.0, 0.5, 0.0, 3.0])
    found = non_negative_least_squares(columns, columns @ true)
    assert found == pytest.approx(true, abs=1e-6)
    values = columns @ np.array([1.0, -1.0, 2.0, 0.5, -0.5, 3.0])
    found = non_negative_least_squares(columns, values)
    assert (found >= 0).all()
    gradient = columns.T @ (values - columns @ found)
    assert (gradient[found == 0] <= 1e-6).all(), "no coefficient that is zero would help"
    assert gradient[found > 0] == pytest.approx(0, abs=1e-5)


def test_a_median_is_not_moved_by_what_lies_far_off() -> None:
    values = np.array([1.0] * 60 + [50.0] * 40)
    assert median_fit(np.ones((100, 1)), values)[0] == pytest.approx(1.0, rel=0.02)


def test_a_step_that_was_read_late_is_timed_together_with_the_large_one_behind_it() -> None:
    """The host was launching the large one when the first ended: their sum is known, and enough for the fit."""
    call = [logged(0.0, 0.0, 0.1, 0.2, 1.0, 1.0) for _ in range(3)]
    late = LoggedStep(2.0, 2.0, 2.1, 22.0, 22.0, 22.1, 0, 1, 2000, 0, 10, 1, 1, 0)
    large = LoggedStep(2.1, 2.1, 22.0, 22.5, 40.0, 41.0, 0, 1, 3000, 0, 10, 1, 1, 0)
    timed = timed_steps([*call, late, large], 1)
    assert [step.device_s for step in timed[3:]] == [None, None]
    assert timed[4].run == (late.work, large.work)
    assert timed[4].run_s == pytest.approx(40.0 - 2.1)

    steps, rng = steps_of(truth, scatter=False), random.Random(4)
    for _ in range(30):
        works = [StepWork(0, 1, rng.randint(600, 1000), 0, 0, 1) for _ in range(2)]
        steps.append(TimedStep(works[1], 0.0, None, None, run=tuple(works), run_s=sum(truth(work) for work in works)))
    work = StepWork(0, 1, 900, 0, 0, 1)
    assert fit_times(steps, lag=1, sizes={}).device_s(work) == pytest.approx(truth(work), rel=0.02)


def test_the_hosts_time_is_told_apart_by_where_it_lies() -> None:
    """Before the launch, with more for prompts and after a rest; and after the tokens."""
    rng, steps = random.Random(6), []
    for place in range(800):
        work, is_first = some_work(rng), place % 10 == 0
        rows = work.rows + work.prompts
        before_s = (0.2 + 0.003 * rows + (0.3 if work.prompts else 0.0) + (0.7 if is_first else 0.0)) * MS
        commit_s = (0.05 + 0.002 * rows) * MS
        steps.append(TimedStep(work, place, truth(work), before_s + commit_s, commit_s=commit_s, is_first=is_first))
    times = fit_times(steps, lag=1, sizes={})
    rows, mixed = StepWork(10, 0, 0, 0, 0, 10), StepWork(9, 1, 50, 0, 0, 10)
    assert times.commit_s(rows) == pytest.approx(0.07 * MS, rel=0.02)
    assert times.host_s(rows) == pytest.approx((0.23 + 0.07) * MS, rel=0.02)
    assert times.host_s(mixed) == pytest.approx((0.53 + 0.07) * MS, rel=0.05)
    assert times.wake_s == pytest.approx(0.7 * MS, rel=0.05)


def test_reads_take_longer_in_steps_of_few_rows() -> None:
    """As on a CPU, where one row's attention cannot use all threads."""
    rng = random.Random(3)

    def seconds(work: StepWork) -> float:
        read_s = {1: 8e-6, 2: 6e-6, 4: 4e-6}.get(work.rows, 3e-6)
        return 0.004 + 0.001 * work.rows + read_s * work.decode_reads

    works = [
        StepWork(rows, 0, 0, rows * rng.randrange(20, 400), 0, rows) for rows in (1, 2, 4, 8, 16) for _ in range(60)
    ]
    steps = [TimedStep(work, float(place), seconds(work), 1e-4) for place, work in enumerate(works)]
    times = fit_times(steps, lag=0, sizes={})
    for rows in (1, 2, 4, 8, 16):
        work = StepWork(rows, 0, 0, rows * 500, 0, rows)
        assert times.device_s(work) == pytest.approx(seconds(work), rel=0.01), rows


def test_numbers_of_rows_that_were_not_measured_read_like_their_neighbours() -> None:
    works = [StepWork(rows, 0, 0, rows * reads, 0, rows) for rows in (2, 4, 16) for reads in range(20, 400, 5)]
    steps = [
        TimedStep(
            work, float(place), 0.004 + 0.001 * work.rows + work.decode_reads * (9e-6 if work.rows < 8 else 3e-6), 1e-4
        )
        for place, work in enumerate(works)
    ]
    times = fit_times(steps, lag=0, sizes={})
    assert times.device_s(StepWork(3, 0, 0, 1500, 0, 3)) == pytest.approx(0.007 + 1500 * 9e-6, rel=0.02)
    reads_s = times.device_s(StepWork(1, 0, 0, 500, 0, 1)) - times.device_s(StepWork(1, 0, 0, 0, 0, 1))
    assert reads_s == pytest.approx(500 * 9e-6, rel=0.02)
