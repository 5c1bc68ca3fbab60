"""Counts per backend: whose request it was, and whose failure."""

from __future__ import annotations

from typing import Any

from tonle.observe import backend_figures
from tonle.observe.backend_figures import BackendFigures, Figures
from tonle.observe.seen_request import SeenRequest


def seen(backend: str, status: str = "ok", **fields: Any) -> SeenRequest:
    return SeenRequest(id="r", arrived=0.0, path="/v1/chat/completions", backend=backend, status=status, **fields)


def test_a_request_counts_for_the_backend_that_answered_and_for_those_that_failed_before() -> None:
    figures = BackendFigures()
    figures.add(seen("a", ttft_s=0.2, last_s=1.2, completion_tokens=11, failed=("b",)))
    figures.add(seen("a", "failed", failed=("a", "b")))
    found = figures.by_name
    assert (found["a"].requests, found["a"].failed, found["a"].ttft.count) == (2, 1, 1)
    assert (found["b"].requests, found["b"].failed, found["b"].ttft.count) == (2, 2, 0)
    assert 0.097 < (found["a"].itl.percentile(50) or 0) < 0.103


def test_what_a_caller_did_is_not_a_backends_doing() -> None:
    figures = BackendFigures()
    for status in ("cancelled", "refused", "cached"):
        figures.add(seen("a", status))
    figures.add(seen("", "failed"))
    assert figures.by_name == {}


def test_a_gateway_that_was_restarted_counts_from_zero() -> None:
    assert Figures(5, 1).since(Figures(100, 50)).requests == 5
    assert Figures(120, 51).since(Figures(100, 50)) == Figures(20, 1)


def test_names_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(backend_figures, "MOST_BACKENDS", 2)
    figures = BackendFigures()
    for name in ("a", "b", "c"):
        figures.add(seen(name))
    assert set(figures.by_name) == {"b", "c"}
