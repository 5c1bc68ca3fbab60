"""The search for saturation, on servers made of a formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tonle.bench.measure import Circumstances, ClientUse, LevelReport, Sample, report_level
from tonle.bench.slo import NO_SLO, Slo
from tonle.bench.sweep import CLOSE_ENOUGH, Saturation, Sweep, SweepKind

Server = Callable[[float], LevelReport]
ANSWER_S = 0.5


def level(
    value: float,
    *,
    per_s: float,
    duration_s: float = 20.0,
    latency_s: float = ANSWER_S,
    slo: Slo = NO_SLO,
    failed: bool = False,
    busy: float = 0.1,
    closed: bool = False,
) -> LevelReport:
    """`per_s` answers of one token per second, to requests that were due `value` per second, or sent as fast as answered."""
    samples = []
    for index in range(max(8, round(duration_s * per_s))):
        end_s = index / per_s + latency_s
        samples.append(
            Sample(
                index=index, start_s=index / per_s, end_s=end_s, last_s=end_s, arrivals_s=[end_s], output_tokens=1,
                due_s=None if closed else index / value, failure="HTTP 503: full" if failed else None,
            )
        )  # fmt: skip
    client = ClientUse(cpu_share=busy, late_p99_ms=1.0, late_max_ms=1.0)
    return report_level(samples, Circumstances(label=f"{value:g}", slo=slo, clients=[client]))


def search(kind: SweepKind, server: Server, start: float = 1.0, max_levels: int = 30) -> tuple[Saturation, list[float]]:
    sweep = Sweep(kind, start, max_levels=max_levels)
    tried: list[float] = []
    while (load := sweep.next_load()) is not None:
        assert load.kind == kind
        tried.append(load.value)
        sweep.add(load, server(load.value))
    result = sweep.saturation()
    assert result is not None
    return result, tried


@pytest.mark.parametrize("capacity", [0.3, 3.7, 50.0])
def test_a_rate_is_found_within_the_bracket(capacity: float) -> None:
    """Answered is what is asked for, up to the capacity; kept up with: to 5 % more than that."""
    found, tried = search("rate", lambda rate: level(rate, per_s=min(rate, capacity)))
    assert found.load is not None and found.high is not None
    assert 0.94 * capacity <= found.load <= 1.11 * capacity
    assert found.load == found.low
    assert found.high - found.load <= CLOSE_ENOUGH * found.high
    assert found.limited_by == "throughput"
    assert "were answered" in found.why
    assert len(tried) == len(set(tried)) <= 16


def test_loads_double_and_then_halve_the_bracket() -> None:
    _, tried = search("rate", lambda rate: level(rate, per_s=min(rate, 5.2)))
    assert tried[:5] == [1.0, 2.0, 4.0, 8.0, 6.0]


def test_the_wait_for_the_last_answers_is_no_sign_of_a_slow_server() -> None:
    """Answers take 4 s, levels 20 s: by the clock alone a rate far below capacity would be missed by a sixth."""
    found, _ = search("rate", lambda rate: level(rate, per_s=min(rate, 8.0), latency_s=4.0))
    assert found.load == pytest.approx(8.0, rel=0.1)


def test_short_levels_are_pointed_out() -> None:
    sweep = Sweep("rate", 1.0, max_levels=4)
    while (load := sweep.next_load()) is not None:
        sweep.add(load, level(load.value, per_s=load.value, latency_s=30.0))
    assert sweep.notes() == [
        "sweep: an answer took 30 s of a level of 50 s; --duration 600 would find the rate more exactly"
    ]


@pytest.mark.parametrize("knee", [1, 5, 40, 150])
def test_users_are_found_where_throughput_stops_growing(knee: int) -> None:
    found, tried = search("concurrency", lambda users: level(users, closed=True, per_s=min(users, knee)))
    assert found.load is not None
    assert 0.9 * knee <= found.load <= 1.05 * knee
    assert found.load == found.high
    assert found.high - (found.low or 0) <= max(1, CLOSE_ENOUGH * found.high)
    assert all(value == int(value) for value in tried)
    assert "more users bring at most" in found.why


def test_an_slo_ends_it_before_throughput_does() -> None:
    slo = Slo.parse(["e2el-p95=2s"])
    found, _ = search(
        "concurrency", lambda users: level(users, closed=True, per_s=users, latency_s=users / 10, slo=slo)
    )
    assert (found.load, found.low, found.high, found.limited_by) == (20, 20, 21, "slo")
    assert found.why == "with 21 users, E2EL p95 ≤ 2 s: 2.1 s, missed"
    assert found.requests_per_s is not None


def test_throughput_ends_it_where_the_slo_never_would() -> None:
    slo = Slo.parse(["itl-p99=50ms"])
    found, _ = search("rate", lambda rate: level(rate, per_s=min(rate, 10.0), slo=slo))
    assert found.limited_by == "throughput"
    found, _ = search("concurrency", lambda users: level(users, closed=True, per_s=min(users, 10.0), slo=slo))
    assert (found.limited_by, found.load) == ("throughput", 10)


def test_the_slo_is_the_boundary_also_where_throughput_is_flat_by_then() -> None:
    """Flat from 8 users on; 95 of 100 answers within 2 s up to 20 users."""
    slo = Slo.parse(["e2el-p95=2s"])
    found, _ = search(
        "concurrency", lambda users: level(users, closed=True, per_s=min(users, 8.0), latency_s=users / 10, slo=slo), 16
    )
    assert (found.load, found.limited_by) == (20, "slo")


def test_a_start_that_is_too_much_goes_down() -> None:
    found, tried = search("rate", lambda rate: level(rate, per_s=min(rate, 3.0)), start=20.0)
    assert tried[:4] == [20.0, 10.0, 5.0, 2.5]
    assert found.load == pytest.approx(3.0, rel=0.1)


def test_nothing_is_low_enough() -> None:
    found, tried = search("concurrency", lambda users: level(users, closed=True, per_s=1.0, failed=True))
    assert (tried, found.load, found.high) == ([1], None, 1)
    assert found.why == "the lowest load that was tried was too much: with 1 user no request was answered"


def test_a_limit_that_one_request_alone_misses_does_not_take_ever_longer_levels() -> None:
    slo = Slo.parse(["ttft-p95=100ms"])
    found, tried = search("rate", lambda rate: level(rate, per_s=rate, slo=slo))
    assert found.load is None and found.limited_by == "slo"
    assert min(tried) >= 0.1 / ANSWER_S / 2


def test_a_server_that_answers_nothing_is_not_asked_more_and_more_slowly() -> None:
    found, tried = search("rate", lambda rate: level(rate, per_s=rate, failed=True), start=8.0)
    assert found.load is None and tried == [8, 4, 2, 1, 0.5]


def test_the_number_of_levels_is_limited_and_said() -> None:
    found, tried = search("rate", lambda rate: level(rate, per_s=rate), max_levels=3)
    assert (tried, found.load, found.limited_by) == ([1.0, 2.0, 4.0], 4.0, "cap")
    assert found.why == "the search reached its limit before any load was too much"
    found, _ = search("rate", lambda rate: level(rate, per_s=min(rate, 5.0)), max_levels=4)
    assert found.why.endswith("; the search ended after 4 levels between 4 and 8")


def test_a_client_that_is_the_limit_is_named() -> None:
    found, _ = search("rate", lambda rate: level(rate, per_s=min(rate, 5.0), busy=0.95))
    assert found.why.endswith("but the client itself was the limit")


def test_what_was_found_is_saved_and_read() -> None:
    found, _ = search("rate", lambda rate: level(rate, per_s=min(rate, 5.0)))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Saturation) == found


def test_no_level_no_result() -> None:
    assert Sweep("rate", 1.0, max_levels=3).saturation(interrupted=True) is None


def test_random_kinds_of_gaps_are_passed_on() -> None:
    load: Any = Sweep("rate", 2.0, max_levels=3, arrivals="gamma", burstiness=0.5).next_load()
    assert (load.arrivals, load.burstiness) == ("gamma", 0.5)


def test_an_slo_is_missed_where_many_requests_fail_though_the_answered_ones_are_fast() -> None:
    """TPOT and ITL are of answered requests only."""

    def server(users: float) -> LevelReport:
        whole = level(users, closed=True, per_s=users, slo=Slo.parse(["tpot-p95=50ms"]))
        failed = whole.requests // 4 if users > 12 else 0
        return msgspec.structs.replace(whole, succeeded=whole.requests - failed, failed=failed)

    found, _ = search("concurrency", server)
    assert (found.load, found.limited_by) == (12, "slo") and "requests failed" in found.why
