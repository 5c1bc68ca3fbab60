"""When a sequence leaves the pipeline for guesses, by what steps were measured to take, and which guesses a step gets."""

from __future__ import annotations

import pytest

from tests.unit.engine.speculate.test_speculator import COPIED, sequence
from tonle.engine.plan import Plan
from tonle.engine.schedule import Sequence
from tonle.engine.speculate import AheadSpeculator
from tonle.engine.speculate.draft_times import DraftTimes


def taught(factor: float, rows: tuple[int, ...] = (1, 16, 64), max_draft: int = 32) -> AheadSpeculator:
    """One that has seen steps with guesses take so many times what others take."""
    speculator = AheadSpeculator(64, 512, max_draft)
    for count in rows:
        plain = Plan(rows=list(range(count)), starts=[100] * count, chunks=[None] * count)
        speculator.step_ended(plain, 0.001, 0)
        for guesses in (8, 30, 60, 120):
            chunks: list[list[int] | None] = [[0] * (1 + guesses), *([[0]] * (count - 1))]
            speculator.step_ended(
                Plan(rows=plain.rows, starts=plain.starts, chunks=chunks, drafts={0: guesses}), 0.001 * factor, 0
            )
    return speculator


def copying() -> Sequence:
    return sequence([1, *COPIED * 3, 5, *COPIED * 2, *COPIED[:5]])


def other() -> Sequence:
    return sequence(list(range(500, 540)))


def test_one_that_copies_waits_and_then_has_guesses() -> None:
    speculator = taught(1.4)
    made = copying()
    assert speculator.look_ahead([made], 1) == [made]
    made.tokens.append(COPIED[5])  # what was in flight
    assert speculator.begin_step(Plan(rows=[0], starts=[60], chunks=[[COPIED[5]]]))
    (guesses,) = speculator.propose_all([(made, 32)])
    assert len(guesses) >= 4 and guesses[:4] == COPIED[6:]


def test_none_waits_without_a_match_or_where_guesses_take_too_long() -> None:
    assert taught(1.4).look_ahead([other()], 1) == []
    slow = taught(30.0)
    assert slow.look_ahead([copying()], 1) == []
    assert slow.begin_step(Plan(rows=[0], starts=[60], chunks=[[1]]))
    assert slow.propose_all([(copying(), 32)]) == [[]]


def test_what_waiting_may_bring_is_limited_by_the_guesses_of_a_step() -> None:
    """With three tokens a step at most, a step that takes three times as long brings nothing."""
    assert taught(3.0).look_ahead([made := copying()], 1) == [made]
    assert taught(3.0, max_draft=2).look_ahead([copying()], 1) == []


def test_one_of_many_waits_only_if_all_of_them_lose_less() -> None:
    made = [copying(), *(other() for _ in range(15))]
    assert taught(1.05).look_ahead(made, 16) == made[:1]
    assert taught(1.5).look_ahead(made, 16) == [], "half a step more for all, for the sake of one"
    all_copy = [copying() for _ in range(16)]
    assert taught(1.5).look_ahead(all_copy, 16) == all_copy


def test_of_very_many_some_are_looked_at_until_guesses_would_pay() -> None:
    speculator = taught(1.3)
    made = [other() for _ in range(64)]
    for handle, each in enumerate(made):
        each.request.handle = handle
    chosen = speculator.choose(made)
    assert len(chosen) == 8 and speculator.look_ahead(chosen, 64) == []
    assert len(speculator.choose(made)) == 8
    copies = [copying() for _ in range(64)]
    for handle, each in enumerate(copies):
        each.request.handle = handle
    assert speculator.look_ahead(speculator.choose(copies), 64) == [], "a sample only tells"
    assert speculator.choose(copies) == copies
    assert len(speculator.look_ahead(copies, 64)) == 64


def test_guesses_that_fail_are_made_no_more() -> None:
    speculator = taught(1.4)
    made = copying()
    for number in range(40):  # what follows is never what followed before
        speculator.look_ahead([made], 1)
        made.tokens += [600 + number, *COPIED[:5]]
    assert speculator.look_ahead([made], 1) == []


def test_times_are_learnt_by_size_and_forgotten() -> None:
    times = DraftTimes()
    assert times.factor(1, 16) == 1.5, "not measured yet"
    times.learn_plain(1, 0.001)
    times.learn_drafted(1, 9, 0.0013)
    assert round(times.factor(1, 16), 6) == round(times.factor(1, 2), 6) == 1.3
    assert times.factor(1, 33) == 1.5, "no larger step was measured"
    times.learn_drafted(1, 40, 0.002)
    assert round(times.factor(1, 33), 6) == 2.0 and round(times.factor(1, 16), 6) == 1.3
    for _ in range(5):
        times.learn_drafted(1, 9, 0.0013)
    times.learn_drafted(1, 9, 1.0)  # a stall
    assert times.factor(1, 16) < 2.0
    for _ in range(2000):
        times.learn_plain(1, 0.001)
    assert times.factor(1, 16) == 1.5, "long ago"


@pytest.mark.parametrize("num_before", [0, 1, 2, 3, 8, 40])
def test_one_step_that_was_held_up_keeps_guesses_off_for_a_while_at_most(num_before: int) -> None:
    times = DraftTimes()
    for _ in range(50):
        times.learn_plain(1, 0.001)
    for _ in range(num_before):
        times.learn_drafted(1, 9, 0.0013)
    times.learn_drafted(1, 9, 0.05)
    steps = 0
    while times.factor(1, 9) > 1.55:  # no guesses, so nothing is learnt of them
        times.learn_plain(1, 0.001)
        steps += 1
    assert steps <= 64 * (num_before + 1)
    times.learn_drafted(1, 9, 0.0013)
    assert times.factor(1, 9) < 1.6, "one step shows that guesses pay"


def test_what_guesses_cost_long_ago_does_not_count() -> None:
    times = DraftTimes()
    times.learn_plain(1, 0.001)
    for _ in range(40):
        times.learn_drafted(1, 9, 0.02)
    for _ in range(1024):
        times.learn_plain(1, 0.001)
    times.learn_drafted(1, 9, 0.0013)
    assert round(times.factor(1, 9), 3) == 1.3


def test_guesses_that_take_long_are_tried_ever_more_rarely() -> None:
    times, num_tries = DraftTimes(), 0
    times.learn_plain(1, 0.001)
    for _ in range(10_000):
        if times.factor(1, 9) < 4.0:
            times.learn_drafted(1, 9, 0.005)
            num_tries += 1
        else:
            times.learn_plain(1, 0.001)
    assert num_tries < 20
