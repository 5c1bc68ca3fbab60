"""Whether a canary is worse: by its failures, its first tokens, the gaps between them; and not by chance."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.observe.backend_figures import Figures
from tonle.observe.sketch import Sketch
from tonle.scaleout.rollout.judge import Tolerance, why_worse

TOLERANCE = Tolerance()


def figures(requests: int, failed: int = 0, ttft_s: list[float] | None = None, itl_s: float = 0.01) -> Figures:
    found = Figures(requests, failed)
    for number in range(requests - failed):
        found.ttft.add(ttft_s[number % len(ttft_s)] if ttft_s else 0.1)
        found.itl.add(itl_s)
    return found


def test_the_same_is_not_worse() -> None:
    assert why_worse(figures(50), figures(500), TOLERANCE) is None


def test_failures_count_if_they_are_more_than_chance() -> None:
    assert "6 of its 50 requests failed" in (why_worse(figures(50, 6), figures(500, 1), TOLERANCE) or "")
    assert why_worse(figures(50, 1), figures(500, 1), TOLERANCE) is None  # one can be luck
    assert why_worse(figures(50, 6), figures(500, 60), TOLERANCE) is None  # the others fail as often


def test_slow_first_tokens_and_slow_gaps_count() -> None:
    slow = figures(50, ttft_s=[0.2])
    assert "time to first token is 20" in (why_worse(slow, figures(500), TOLERANCE) or "")
    assert why_worse(slow, figures(500), Tolerance(latency=1.5)) is None
    assert "time between tokens" in (why_worse(figures(50, itl_s=0.02), figures(500), TOLERANCE) or "")
    faster = figures(50, ttft_s=[0.05], itl_s=0.005)
    assert why_worse(faster, figures(500), TOLERANCE) is None


def test_one_slow_request_of_twenty_is_what_a_p95_allows() -> None:
    mostly = [0.1] * 19 + [0.5]
    assert why_worse(figures(40, ttft_s=mostly), figures(500, ttft_s=[0.1] * 99 + [0.5]), TOLERANCE) is None
    many = [0.1] * 4 + [0.5]
    assert why_worse(figures(40, ttft_s=many), figures(500), TOLERANCE) is not None


def test_nothing_is_said_of_few() -> None:
    assert why_worse(figures(19, 19), figures(500), TOLERANCE) is None
    assert why_worse(figures(20, 20), figures(500), TOLERANCE) is not None
    assert why_worse(figures(100, 50), Figures(), TOLERANCE) is None  # nothing to compare with


@settings(max_examples=40)
@given(st.lists(st.floats(1e-4, 100), min_size=20, max_size=200), st.integers(0, 200), st.integers(0, 20))
def test_a_copy_of_the_others_is_never_worse(values: list[float], cut: int, failed: int) -> None:
    one, two = Figures(len(values) + failed, failed), Figures(len(values) + failed, failed)
    for value in values:
        one.ttft.add(value)
        two.ttft.add(value)
    assert why_worse(one, two, TOLERANCE) is None


@settings(max_examples=40)
@given(st.lists(st.floats(1e-4, 100)), st.lists(st.floats(1e-4, 100)))
def test_what_was_added_since_is_what_was_added(before: list[float], added: list[float]) -> None:
    sketch, later = Sketch(), Sketch()
    for value in before:
        sketch.add(value)
        later.add(value)
    wanted = Sketch()
    for value in added:
        later.add(value)
        wanted.add(value)
    assert later.since(sketch).counts == wanted.counts
