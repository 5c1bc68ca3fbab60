"""How many replicas a load needs: bounds, both signals, delays, and no swinging."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonle.scaleout.demand import ReplicaLoad, ScaleLimits, Scaler, recommend

LIMITS = ScaleLimits(
    min_replicas=1, max_replicas=10, waiting_requests=5, max_use=0.8, max_num_seqs=10, up_delay_s=10, down_delay_s=60
)

some_loads = st.lists(
    st.none()
    | st.builds(
        ReplicaLoad, running=st.integers(0, 40), waiting=st.integers(0, 200), kv_use=st.floats(0, 1, allow_nan=False)
    ),
    max_size=12,
)


def busy(running: int, waiting: int = 0, kv_use: float = 0.0) -> ReplicaLoad:
    return ReplicaLoad(running=running, waiting=waiting, kv_use=kv_use)


@pytest.mark.parametrize(
    ("loads", "current", "wanted"),
    [
        ([busy(0)], 1, 1),
        ([busy(0), busy(0), busy(0)], 3, 1),
        ([busy(10, waiting=12)], 1, 3),  # 12 waiting, 5 each
        ([busy(10)], 1, 2),  # full: 1.0 / 0.8
        ([busy(2, kv_use=0.95)], 1, 2),  # few, but long
        ([busy(7), busy(7), busy(0)], 3, 3),  # two could do it (1.4 / 1.6), but only just
        ([busy(4), busy(4), busy(4)], 3, 2),  # two can: 1.2 / (2 * 0.64)
        ([busy(10, waiting=400)], 1, 10),
        ([], 4, 4),  # nothing is ready: nothing is known
        ([None, None], 2, 2),  # silent is not idle
        ([None, busy(10, waiting=3)], 2, 3),
    ],
)
def test_a_load_needs_so_many(loads: list[ReplicaLoad | None], current: int, wanted: int) -> None:
    assert recommend(loads, current, LIMITS) == wanted


@given(some_loads, st.integers(1, 10))
def test_a_recommendation_is_within_bounds(loads: list[ReplicaLoad | None], current: int) -> None:
    assert 1 <= recommend(loads, current, LIMITS) <= 10


@given(some_loads.filter(bool), st.integers(1, 10), st.integers(0, 11), st.integers(1, 50))
def test_more_load_never_needs_fewer(loads: list[ReplicaLoad | None], current: int, place: int, more: int) -> None:
    index = place % len(loads)
    load = loads[index]
    if load is None:
        return
    heavier = [*loads]
    heavier[index] = replace(load, running=load.running + more, waiting=load.waiting + more)
    assert recommend(heavier, current, LIMITS) >= recommend(loads, current, LIMITS)


@given(st.floats(0, 100, allow_nan=False), st.integers(1, 10))
def test_a_steady_load_comes_to_rest(total: float, start: int) -> None:
    """The same work, spread over as many replicas as were wanted last: the number stops changing."""
    current = start
    seen = []
    for _ in range(20):
        running = min(total / current, LIMITS.max_num_seqs)
        load = ReplicaLoad(running=round(running), waiting=max(0, round(total / current) - LIMITS.max_num_seqs))
        current = recommend([load] * current, current, LIMITS)
        seen.append(current)
    assert len(set(seen[-5:])) == 1, seen


def test_up_waits_for_its_delay() -> None:
    scaler = Scaler(LIMITS, 1)
    seen = [scaler.look(now, [busy(10, waiting=12)], is_settled=True) for now in range(12)]
    assert seen[:10] == [1] * 10
    assert seen[10] == 3


def test_a_short_burst_adds_nothing() -> None:
    scaler = Scaler(LIMITS, 1)
    for now in range(100):
        load = busy(10, waiting=50) if now % 8 < 7 else busy(1)  # a quiet look in every ten seconds
        assert scaler.look(now, [load], is_settled=True) == 1


def test_down_waits_for_its_delay_and_takes_the_most_that_was_wanted() -> None:
    scaler = Scaler(LIMITS, 6)
    seen = {}
    for now in range(140):
        load = busy(6) if now < 20 else busy(0)  # 6 * 0.6 / 0.64: 6
        seen[now] = scaler.look(now, [load] * 6, is_settled=True)
    assert seen[79] == 6
    assert seen[81] == 1


def test_none_is_added_while_others_start() -> None:
    scaler = Scaler(LIMITS, 2)
    loads = [busy(10, waiting=100)]
    for now in range(30):
        assert scaler.look(now, loads, is_settled=False) == 2
    assert scaler.look(31, loads, is_settled=True) == 10


@given(st.lists(some_loads, min_size=1, max_size=60), st.integers(0, 12))
def test_a_scaler_stays_within_bounds_and_never_shrinks_early(
    looks: list[list[ReplicaLoad | None]], start: int
) -> None:
    scaler = Scaler(LIMITS, start)
    before = scaler.replicas
    for now, loads in enumerate(looks):
        after = scaler.look(float(now), loads, is_settled=True)
        assert 1 <= after <= 10
        if now < LIMITS.down_delay_s:
            assert after >= before
        before = after
