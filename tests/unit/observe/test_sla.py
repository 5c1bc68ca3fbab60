"""Latency targets: when a verdict turns and turns back, how fast the allowance is used up, and what is named as the cause."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from tonle.observe.seen_request import SeenRequest
from tonle.observe.sla import HOLD_S, MIN_REQUESTS, WINDOW_S, Sla, TargetVerdict, parts_of
from tonle.observe.target_window import PARTS, SLOT_S, TargetWindow
from tonle.telemetry.percentile import percentile
from tonle.telemetry.time_spent import TimeSpent

START = 1_700_000_000.0


class Clock:
    """Monotonic and wall time, moved by hand."""

    def __init__(self) -> None:
        self.s = 1000.0

    def sla(self, **targets: float) -> Sla:
        total_s = targets.pop("e2e", 100.0)
        return Sla(
            total_s,
            ttft_p95_s=targets.get("ttft"),
            itl_p95_s=targets.get("itl"),
            clock=lambda: self.s,
            now=lambda: START + self.s,
        )


def seen(**fields: Any) -> SeenRequest:
    usual: dict[str, Any] = {
        "id": "r", "arrived": START, "path": "/v1/chat/completions", "status": "ok", "backend": "a", "accepted_s": 0.001,
        "sent_s": 0.01, "ttft_s": 0.1, "last_s": 1.1, "total_s": 1.11, "completion_tokens": 11,
        "engine_s": {"queue": 0.0, "prefill": 0.09, "decode": 1.0},
    }  # fmt: skip
    return SeenRequest(**usual | fields)


def queued(backend: str = "b", seconds: float = 0.5) -> SeenRequest:
    """One that waited in its engine's queue."""
    engine = {"queue": seconds, "prefill": 0.09, "decode": 1.0}
    return seen(backend=backend, ttft_s=0.1 + seconds, last_s=1.1 + seconds, total_s=1.11 + seconds, engine_s=engine)


def target(sla: Sla, name: str) -> TargetVerdict:
    (found,) = [each for each in sla.verdict().targets if each.name == name]
    return found


def test_a_missed_target_says_since_when_and_why() -> None:
    clock = Clock()
    sla = clock.sla(ttft=0.2)
    for _ in range(90):
        sla.ended(seen())
    assert sla.verdict().meets and target(sla, "ttft").since is None
    clock.s += 5
    for _ in range(10):
        sla.ended(queued())
    verdict, ttft = sla.verdict(), target(sla, "ttft")
    assert not verdict.meets and not ttft.meets
    assert ttft.since == START + 1005
    assert ttft.burn_rate == verdict.burn_rate == 2.0  # 10 % of the requests, where 5 % may be
    assert ttft.cause == "queueing at b" and ttft.requests == 100
    assert ttft.value_s == pytest.approx(0.6, rel=0.03)
    moment = time.strftime("%H:%M", time.localtime(START + 1005))
    assert verdict.sentence == f"TTFT p95 over 200 ms since {moment}: queueing at b"


def test_a_target_that_is_hardly_missed_is_not_said_to_hold() -> None:
    sla = Clock().sla(e2e=1.0)
    for place in range(100_000):
        sla.ended(seen(status="failed", total_s=2.0 if place < 5001 else 0.1))
    found = target(sla, "e2e")
    assert not found.meets and found.burn_rate > 1
    assert " was over " not in found.sentence


def test_requests_that_no_model_runs_for_hide_no_slow_ones() -> None:
    sla = Clock().sla(e2e=1.0)
    for _ in range(MIN_REQUESTS):
        sla.ended(seen())
        for _ in range(50):
            sla.ended(seen(path="/tokenize", computed=False, sent_s=0.0, ttft_s=None, last_s=None, total_s=0.001))
    found = target(sla, "e2e")
    assert not found.meets and found.requests == MIN_REQUESTS and sla.counts() == {"e2e": (MIN_REQUESTS, MIN_REQUESTS)}


def test_a_few_requests_are_no_verdict() -> None:
    clock = Clock()
    sla = clock.sla(ttft=0.2)
    for _ in range(MIN_REQUESTS - 1):
        sla.ended(queued())
    assert sla.verdict().meets and target(sla, "ttft").burn_rate == 20.0
    assert f"of {MIN_REQUESTS - 1} requests only" in target(sla, "ttft").sentence
    clock.s += 1
    sla.ended(queued())
    assert not sla.verdict().meets


def test_a_target_must_hold_for_a_while_before_it_counts_as_met() -> None:
    clock = Clock()
    sla = clock.sla(ttft=0.2)
    for _ in range(MIN_REQUESTS):
        sla.ended(queued())
    since = target(sla, "ttft").since
    assert since is not None
    clock.s += 1
    for _ in range(1000):
        sla.ended(seen())
    assert target(sla, "ttft").burn_rate < 1 and target(sla, "ttft").since == since, "it has not held yet"
    moment = time.strftime("%H:%M", time.localtime(since))
    assert target(sla, "ttft").sentence == f"TTFT p95 was over 200 ms since {moment}: queueing at b; now 99.6 ms"
    clock.s += HOLD_S / 2
    for _ in range(200):  # slow again before the time is over
        sla.ended(queued())
    assert target(sla, "ttft").since == since and target(sla, "ttft").burn_rate > 1
    clock.s += 1
    for _ in range(10_000):
        sla.ended(seen())
    sla.verdict()
    clock.s += HOLD_S - 1
    assert not target(sla, "ttft").meets
    clock.s += 1
    assert target(sla, "ttft").meets and target(sla, "ttft").cause == ""


def test_a_target_is_met_again_after_silence() -> None:
    clock = Clock()
    sla = clock.sla(ttft=0.2)
    for _ in range(MIN_REQUESTS):
        sla.ended(queued())
    assert not sla.verdict().meets
    clock.s += WINDOW_S + SLOT_S
    assert not sla.verdict().meets
    clock.s += HOLD_S
    verdict = sla.verdict()
    assert verdict.meets and verdict.burn_rate == 0
    assert "no request in five minutes" in verdict.sentence


@pytest.mark.parametrize(
    ("slow", "name", "cause"),
    [
        (queued("b"), "ttft", "queueing at b"),
        (seen(queued_s=0.6, sent_s=0.61, ttft_s=0.7, backend="b"), "ttft", "queueing at b"),  # waited in the gateway
        (seen(ttft_s=0.7, engine_s={"queue": 0.0, "prefill": 0.69}, backend="b"), "ttft", "prefill at b"),
        (seen(ttft_s=0.7, engine_s=None, backend="vllm"), "ttft", "queueing or prefill at vllm"),
        (seen(sent_s=0.6, ttft_s=0.69), "ttft", "work in the gateway"),
        (seen(last_s=5.0, total_s=5.01, backend="b"), "e2e", "decode at b"),
        (queued("b", 0.95), "e2e", "queueing at b"),  # most of its time is decoding, as of the others
        (seen(total_s=5.0), "e2e", "delivery to callers"),
        (seen(last_s=5.1, total_s=5.11, backend="b"), "itl", "decode at b"),
        (seen(last_s=5.1, total_s=5.11, spent=TimeSpent(stalled_s=4.0), backend="b"), "itl",
         "decode stalled by prompts at b"),
        (seen(last_s=5.1, total_s=5.11, spent=TimeSpent(preempted_s=4.0), is_local=True), "itl", "preemption"),
        (seen(status="cancelled", ttft_s=None, last_s=None, total_s=3.0, engine_s=None, backend="b"), "ttft",
         "queueing or prefill at b"),
    ],
)  # fmt: skip
def test_the_part_with_most_of_the_excess_is_the_cause(slow: SeenRequest, name: str, cause: str) -> None:
    clock = Clock()
    sla = clock.sla(e2e=2.0, ttft=0.2, itl=0.3)
    for index in range(100):
        sla.ended(slow if index % 5 == 0 else seen(spent=TimeSpent() if slow.spent else None))
    assert target(sla, name).cause == cause


def test_no_backend_is_named_where_none_has_most_of_it() -> None:
    sla = Clock().sla(ttft=0.2)
    for index in range(99):
        sla.ended(queued("abc"[index % 3]))
    assert target(sla, "ttft").cause == "queueing"


def test_what_says_nothing_about_speed_is_not_counted() -> None:
    sla = Clock().sla(e2e=2.0, ttft=0.2)
    for _ in range(50):
        sla.ended(seen(status="refused", total_s=9.0, ttft_s=9.0))
        sla.ended(seen(status="cancelled", total_s=0.1, ttft_s=None))  # it left before the target
    assert [each.requests for each in sla.verdict().targets] == [0, 0]
    sla.ended(seen(status="failed", total_s=9.0, ttft_s=9.0))
    assert [each.requests for each in sla.verdict().targets] == [0, 0], "judged once a second"
    assert sla.counts() == {"e2e": (1, 1), "ttft": (0, 0)}


def test_the_cause_of_slow_gaps_is_told_per_token() -> None:
    """Not per request: a long answer spends more in decode than a short one, at the same pace."""
    sla = Clock().sla(itl=0.012)
    for _ in range(90):
        sla.ended(seen(completion_tokens=2, last_s=0.11, total_s=0.12))
    for _ in range(10):
        spent = TimeSpent(stalled_s=0.5)
        sla.ended(seen(backend="b", completion_tokens=101, last_s=1.6, total_s=1.61, spent=spent))
    assert target(sla, "itl").cause == "decode stalled by prompts at b"


def test_the_parts_add_up_to_the_whole() -> None:
    draw = random.Random(1)
    for _ in range(300):
        sent_s = draw.uniform(0, 2)
        first_s = sent_s + draw.uniform(0, 2)
        last_s = first_s + draw.uniform(0, 2)
        spent = TimeSpent(stalled_s=draw.uniform(0, 3), preempted_s=draw.uniform(0, 3))
        request = seen(
            queued_s=draw.uniform(0, sent_s), sent_s=sent_s, ttft_s=first_s, last_s=last_s, total_s=last_s + draw.random(),
            engine_s=draw.choice([None, {"queue": draw.uniform(0, 3)}]), spent=draw.choice([None, spent]),
        )  # fmt: skip
        parts = parts_of(request)
        assert sum(parts) == pytest.approx(request.total_s) and min(parts) >= 0


def test_a_window_is_the_requests_of_its_time() -> None:
    """Against a plain list."""
    draw, window = random.Random(2), TargetWindow(1.0, 60.0)
    kept: list[tuple[float, float]] = []
    now_s = 0.0
    for _ in range(3000):
        now_s += draw.expovariate(10)
        value_s = draw.lognormvariate(-0.5, 0.8)
        kept.append((now_s, value_s))
        window.add(now_s, value_s, draw.choice("ab"), [value_s if part == "decode" else 0.0 for part in PARTS])
        if draw.random() < 0.02:
            now_s += draw.choice([1.0, 15.0, 90.0])
        state = window.read(now_s)
        first_slot = int(now_s / SLOT_S) - 5
        values = sorted(value for at_s, value in kept if int(at_s / SLOT_S) >= first_slot)
        assert state.count == len(values) and state.num_slow == sum(value > 1.0 for value in values)
        if values:
            found = state.percentile(95)
            assert found is not None
            nearest = min(values, key=lambda value: abs(value - found))
            assert found == pytest.approx(nearest, rel=0.02)
            assert found <= percentile(values, 100) * 1.02
    assert re.fullmatch("[ab]?", (window.read(now_s).excess() or ("", ""))[1])
