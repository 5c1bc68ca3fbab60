"""Experiments, prefixes and breakers: pure enough to be tested alone."""

from __future__ import annotations

from collections import Counter

import pytest

from tonle.config.routing import ArmConfig, ExperimentConfig
from tonle.gateway.backends.blame import Blame
from tonle.gateway.backends.breaker import Breaker
from tonle.gateway.backends.prefill_leg import prefill_changes
from tonle.gateway.parsed_request import estimate_tokens
from tonle.gateway.routing.prefix_affinity import PIECE_CHARS, PrefixMemory, first_home, piece_names
from tonle.gateway.routing.router import assign


def experiment(share: float = 1.0, **weights: float) -> ExperimentConfig:
    arms = tuple(ArmConfig(name=name, weight=weight) for name, weight in weights.items())
    return ExperimentConfig(name="e", model="m", arms=arms, share=share)


def test_arms_get_their_share_and_users_stay() -> None:
    split = experiment(a=90, b=10)
    first = [assign(split, f"user-{index}") for index in range(5000)]
    assert first == [assign(split, f"user-{index}") for index in range(5000)]
    counts = Counter(arm.name for arm in first if arm is not None)
    assert 4400 < counts["a"] < 4600 and counts["a"] + counts["b"] == 5000


def test_a_share_of_users_takes_part() -> None:
    split = experiment(0.2, a=1, b=1)
    inside = sum(assign(split, f"user-{index}") is not None for index in range(5000))
    assert 900 < inside < 1100
    wider = experiment(0.4, a=1, b=1)
    for index in range(500):
        if (before := assign(split, f"user-{index}")) is not None:
            assert assign(wider, f"user-{index}") == before  # widening moves no user


def test_an_arm_of_weight_0_gets_nobody() -> None:
    assert {assign(experiment(a=1, b=0), f"u{index}") for index in range(1000)} == {ArmConfig(name="a", weight=1)}


def test_shared_beginnings_share_names_and_owners_do_not() -> None:
    begin = "x" * PIECE_CHARS * 3
    one, two = piece_names(begin + "one" * 200, "s"), piece_names(begin + "two" * 200, "s")
    assert one[:3] == two[:3] and one[3] != two[3]
    assert not set(one) & set(piece_names(begin, "other"))
    assert len(piece_names("short", "s")) == 1


def test_the_longest_beginning_wins_and_memory_is_bounded() -> None:
    memory = PrefixMemory(max_names=10)
    names = piece_names("y" * PIECE_CHARS * 4, "s")
    memory.remember(names[:2], "a")
    memory.remember(names[:3], "b")
    assert memory.longest(names, {"a", "b"}) == ("b", 3)
    assert memory.longest(names, {"a"}) == (None, 0)
    for index in range(20):
        memory.remember(piece_names(str(index), "s"), "c")
    assert memory.longest(names, {"a", "b"}) == (None, 0)


def test_a_first_home_moves_little_when_a_backend_leaves() -> None:
    names = [piece_names(str(index), "s")[0] for index in range(600)]
    before = [first_home(name, ["a", "b", "c"]) for name in names]
    after = [first_home(name, ["a", "b"]) for name in names]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "c")
    assert min(Counter(before).values()) > 120


def test_a_breaker_opens_tries_once_and_closes() -> None:
    now_s = 0.0
    breaker = Breaker(max_failures=2, pause_s=10, clock=lambda: now_s)
    breaker.fail()
    assert breaker.allows
    breaker.fail()
    assert not breaker.allows and breaker.retry_after_s == 10
    now_s = 10.0
    assert breaker.allows and breaker.state == "half open"
    breaker.begin()
    assert not breaker.allows  # one at a time
    breaker.fail()
    assert breaker.state == "open"
    now_s = 20.0
    breaker.begin()
    breaker.succeed()
    assert breaker.state == "closed" and breaker.allows


def test_success_forgets_failures() -> None:
    breaker = Breaker(max_failures=2, pause_s=10)
    for _ in range(5):
        breaker.fail()
        breaker.succeed()
    assert breaker.allows


def test_the_prefill_leg_asks_for_one_token() -> None:
    first = prefill_changes({"messages": [], "max_completion_tokens": 9}, "m")
    assert first["max_tokens"] == first["max_completion_tokens"] == 1
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert "max_completion_tokens" not in prefill_changes({"messages": []}, "m")


@pytest.mark.parametrize(("text", "low", "high"), [("a" * 400, 90, 110), ("ភាសាខ្មែរ" * 10, 60, 130), ("", 0, 1)])
def test_estimates_are_near(text: str, low: int, high: int) -> None:
    assert low <= estimate_tokens(text) <= high


def test_one_callers_failures_pause_a_backend_for_that_caller_alone() -> None:
    now_s = 0.0
    breaker = Breaker(max_failures=2, pause_s=10, clock=lambda: now_s)
    for _ in range(5):
        breaker.fail("mallory")
    assert (breaker.state, breaker.allows, breaker.retry_after_s) == ("open", True, 0.0)
    assert not breaker.allows_for("mallory") and breaker.allows_for("alice")
    breaker.fail("alice")
    assert not breaker.allows and not breaker.allows_for("bob")
    now_s = 10.0
    breaker.begin()
    breaker.fail("mallory")  # the trial: it does not decide for others
    assert breaker.allows_for("alice") and not breaker.allows_for("mallory")
    breaker.fail("alice")
    assert not breaker.allows


def test_a_failure_may_be_taken_back() -> None:
    breaker = Breaker(max_failures=2, pause_s=10)
    breaker.fail("mallory")
    breaker.fail("alice")
    assert not breaker.allows
    breaker.forgive("mallory")
    assert breaker.state == "closed" and breaker.allows_for("mallory")
    breaker.forgive("mallory")  # a success came between: nothing is left to take back
    breaker.fail("alice")
    assert breaker.state == "open"


class _Backend:
    def __init__(self) -> None:
        self.breaker = Breaker(max_failures=1, pause_s=10)
        self.num_failed = 0


def test_two_backends_that_fail_on_one_request_are_not_at_fault() -> None:
    one, two = _Backend(), _Backend()
    blame = Blame("caller")
    blame.fail(one)  # type: ignore[arg-type]
    assert one.breaker.state == "open"
    blame.fail(two)  # type: ignore[arg-type]
    assert (one.breaker.state, two.breaker.state) == ("closed", "closed")
    assert (one.num_failed, two.num_failed) == (1, 1)


@pytest.mark.parametrize(("status", "state"), [(200, "open"), (400, "closed"), (422, "closed"), (429, "open")])
def test_a_backend_that_failed_is_at_fault_if_another_answers(status: int, state: str) -> None:
    for failed_first in (True, False):
        one, two = _Backend(), _Backend()
        blame = Blame("caller")
        steps = [lambda: blame.fail(one), lambda: blame.answer(two, status)]  # type: ignore[arg-type] # noqa: B023
        for step in steps if failed_first else reversed(steps):
            step()
        assert (one.breaker.state, two.breaker.state) == (state, "closed")


def test_a_backend_that_cannot_be_reached_is_at_fault() -> None:
    one = _Backend()
    Blame("caller").unreachable(one)  # type: ignore[arg-type]
    assert not one.breaker.allows
