"""The definitions, on moments chosen by hand; percentiles against numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonle.bench.keeping_up import is_overloaded
from tonle.bench.measure import Circumstances, ClientUse, Sample, group_failures, report_level, spread
from tonle.telemetry.percentile import percentile

finite = st.floats(-1e9, 1e9)


@given(st.lists(finite, min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(st.lists(finite, min_size=1, max_size=60))
def test_spread_is_numpys(values: list[float]) -> None:
    found = spread(values, scale=2.0)
    assert found is not None
    doubled = np.array(values) * 2.0
    assert found.mean == pytest.approx(doubled.mean(), rel=1e-9, abs=1e-6)
    for name, percent in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("min", 0), ("max", 100)):
        assert getattr(found, name) == pytest.approx(np.percentile(doubled, percent), rel=1e-9, abs=1e-6)
    assert found.count == len(values)


def test_spread_of_nothing_is_none() -> None:
    assert spread([None, None]) is None


def answered(index: int = 0, start_s: float = 100.0, **changes: object) -> Sample:
    """Four tokens: the first after 0.5 s, then 0.1, 0.2 and 0.1 s apart; the finish reason 0.1 s after the last."""
    fields: dict[str, object] = {
        "index": index,
        "start_s": start_s,
        "end_s": start_s + 1.5,
        "arrivals_s": [start_s + offset for offset in (0.5, 0.6, 0.8, 0.9)],
        "last_s": start_s + 1.0,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 4,
    }
    return Sample(**(fields | changes))  # type: ignore[arg-type]


def test_latencies_of_one_answer() -> None:
    sample = answered()
    assert sample.ttft_s == pytest.approx(0.5)
    assert sample.e2el_s == pytest.approx(1.0)
    assert sample.tpot_s == pytest.approx(0.5 / 3)
    assert sample.itl_s == pytest.approx([0.1, 0.2, 0.1])


def test_several_tokens_in_a_chunk_change_gaps_but_not_time_per_token() -> None:
    sample = answered(arrivals_s=[100.5, 100.9])  # two tokens each
    assert sample.tpot_s == answered().tpot_s
    assert sample.itl_s == pytest.approx([0.4])


def test_one_token_has_no_time_per_token() -> None:
    sample = answered(arrivals_s=[100.5], output_tokens=1)
    assert sample.tpot_s is None
    assert sample.itl_s == []


def test_tokens_that_never_became_text_are_first_seen_at_the_end() -> None:
    assert answered(arrivals_s=[]).ttft_s == pytest.approx(1.0)
    assert answered(arrivals_s=[], output_tokens=0).ttft_s is None


def test_a_level_counts_the_good_and_names_the_bad() -> None:
    samples = [
        answered(0, 100.0),
        answered(1, 102.0),
        answered(2, 100.5, failure="HTTP 500: boom", output_tokens=3, end_s=104.0),
    ]
    clients = [ClientUse(cpu_share=share, late_p99_ms=1.0, late_max_ms=2.0) for share in (0.05, 0.1)]
    level = report_level(samples, Circumstances(label="x", concurrency=2, clients=clients), keep_rows=True)
    assert (level.requests, level.succeeded, level.failed) == (3, 2, 1)
    assert level.duration_s == pytest.approx(4.0)
    assert level.requests_per_s == pytest.approx(0.5)
    assert level.output_tokens_per_s == pytest.approx(2.0)
    assert level.total_tokens_per_s == pytest.approx(7.0)
    assert (level.prompt_tokens, level.cached_tokens, level.output_tokens) == (20, 8, 8)
    assert level.client_cpu_share == pytest.approx(0.1)
    assert level.counted_by == ["usage"]
    assert level.ttft_ms is not None
    assert level.ttft_ms.count == 2
    assert level.itl_ms is not None
    assert level.itl_ms.count == 6
    assert level.rows is not None
    assert [row.start_s for row in level.rows] == pytest.approx([0.0, 2.0, 0.5])
    assert level.rows[0].itl_ms == pytest.approx([100, 200, 100])
    assert level.rows[2].failure == "HTTP 500: boom"


def test_a_level_without_answers_has_no_latencies() -> None:
    level = report_level([answered(failure="timeout")], Circumstances(label="x"))
    assert level.ttft_ms is level.tpot_ms is level.itl_ms is level.e2el_ms is None
    assert level.requests_per_s == level.output_tokens_per_s == 0
    assert level.prompt_tokens is None
    assert level.rows is None


def test_an_empty_level_is_a_report_too() -> None:
    level = report_level([], Circumstances(label="x", interrupted=True))
    assert (level.requests, level.duration_s, level.interrupted) == (0, 0.0, True)


def test_failures_alike_but_for_numbers_are_one_group() -> None:
    groups = group_failures([
        "HTTP 400: prompt of 700 tokens, id req-1a",
        "timeout: no full answer in 3 s",
        "HTTP 400: prompt of 812 tokens, id req-2b",
        "HTTP 503: prompt of 700 tokens, id req-1a",
    ])  # fmt: skip
    assert [(group.count, group.example) for group in groups] == [
        (2, "HTTP 400: prompt of 700 tokens, id req-1a"),
        (1, "timeout: no full answer in 3 s"),
        (1, "HTTP 503: prompt of 700 tokens, id req-1a"),
    ]


@pytest.mark.parametrize("overload", [0.5, 1.0, 1.2, 3.0])
def test_a_server_that_falls_behind_answers_later_and_later(overload: float) -> None:
    """Due 10 per second, answered at most 10 / overload per second: E2EL grows by overload − 1 per second."""
    samples = []
    for index in range(100):
        due_s = 100.0 + index / 10
        end_s = max(due_s, 100.0 + index * overload / 10) + 0.5
        samples.append(answered(index, due_s, due_s=due_s, last_s=end_s, end_s=end_s))
    level = report_level(samples, Circumstances(label="x", rate=9.0))
    assert level.falling_behind == pytest.approx(max(0.0, overload - 1), abs=1e-6)
    assert level.offered_per_s == pytest.approx(10.0)
    assert report_level(samples[:2], Circumstances(label="x")).falling_behind is None
    closed = report_level([answered(index) for index in range(9)], Circumstances(label="x"))
    assert closed.falling_behind is None and closed.offered_per_s is None


@pytest.mark.parametrize(("overload", "is_too_much"), [(1.0, False), (1.5, True)])
def test_answers_of_many_lengths_are_no_overload_by_chance(overload: float, is_too_much: bool) -> None:
    """50 requests per second for 8 s, answers of up to 4 s: by chance a slope is up to 0.1."""
    rng = random.Random(1)
    found = []
    for _ in range(20):
        samples = []
        for index in range(400):
            due_s = index / 50
            last_s = due_s * overload + rng.uniform(0, 4)
            samples.append(answered(index, due_s, due_s=due_s, last_s=last_s, end_s=last_s))
        found.append(is_overloaded(samples))
    assert found.count(is_too_much) >= 19
