"""What keys used, by day and model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tonle.observe import history_file
from tonle.observe.history import History
from tonle.observe.seen_request import SeenRequest
from tonle.observe.usage import Usage

MORNING = 1_767_254_400.0  # 2026-01-01 08:00 UTC
DAY_S = 86_400.0


def seen(**fields: Any) -> SeenRequest:
    basics = {"id": "r", "arrived": MORNING, "path": "/v1/chat/completions", "model": "m", "key_id": "k1", "key_name": "alice",
              "status": "ok", "prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 5, "accepted_s": 0.001,
              "device_s": 0.5}  # fmt: skip
    return SeenRequest(**basics | fields)


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "h.db")


def save(history: History, usage: Usage) -> bool:
    return history.file.save([history, usage])


def test_requests_add_up_before_and_after_they_are_saved(history: History) -> None:
    usage = Usage(history.file)
    usage.add(seen(cost=0.25))
    usage.add(seen(status="failed", completion_tokens=1))
    assert save(history, usage)
    usage.add(seen(cost=0.5, key_name="alice 2"))
    usage.add(seen(model="other"))
    usage.add(seen(key_id="k2", key_name="bob"))
    for _ in range(2):
        one, other, bob = usage.rows("2026-01-01", "2026-01-01")
        assert (one.requests, one.failed, one.prompt_tokens, one.cached_tokens, one.completion_tokens) == (
            3,
            1,
            30,
            12,
            11,
        )
        assert one.cost == 0.75 and one.device_s == 1.5 and one.key_name == "alice 2"
        assert other.model == "other" and other.cost is None and bob.key_name == "bob"
        assert save(history, usage)


def test_days_are_those_of_utc_and_of_the_range(history: History) -> None:
    usage = Usage(history.file)
    for number in range(3):
        usage.add(seen(arrived=MORNING + number * DAY_S))
    usage.add(seen(arrived=MORNING + 15.999 * 3600))
    assert [(row.day, row.requests) for row in usage.rows("2026-01-01", "2026-01-02")] == [
        ("2026-01-01", 2),
        ("2026-01-02", 1),
    ]


def test_a_cached_answer_is_a_request_without_tokens(history: History) -> None:
    usage = Usage(history.file)
    usage.add(seen(status="cached", cost=1.0))
    (row,) = usage.rows("2026-01-01", "2026-01-01")
    assert row.requests == 1 and row.prompt_tokens == row.completion_tokens == 0 and row.cost is None


def test_callers_cannot_fill_the_file_with_names(history: History) -> None:
    usage = Usage(history.file)
    for number in range(100):
        usage.add(seen(model=f"invented-{number}", status="refused", accepted_s=None, key_id="", key_name=""))
    (row,) = usage.rows("2026-01-01", "2026-01-01")
    assert row.model == "" and row.requests == 100


def test_it_survives_a_restart_and_a_failed_save(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage(history.file)
    usage.add(seen())
    with monkeypatch.context() as broken:
        broken.setattr("tonle.observe.usage._UPSERT", "INSERT INTO nowhere VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)")
        assert not save(history, usage)
    usage.add(seen())
    (row,) = usage.rows("2026-01-01", "2026-01-01")
    assert row.requests == 2
    assert save(history, usage)
    history.file.close()
    assert history.file.path is not None
    later = Usage(History(history.file.path).file)
    assert [row.requests for row in later.rows("2026-01-01", "2026-12-31")] == [2]


def test_four_hundred_days_are_kept(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage(history.file)
    for number in (0, 1, 400):
        usage.add(seen(arrived=MORNING + number * DAY_S))
    assert save(history, usage)
    assert len(usage.rows("2026-01-01", "2028-01-01")) == 3, "the clock may be wrong: nothing is dropped yet"
    monkeypatch.setattr(history_file, "STEADY_S", 0.0)
    usage.add(seen(arrived=MORNING + 400 * DAY_S))
    assert save(history, usage)
    assert [row.day for row in usage.rows("2026-01-01", "2028-01-01")] == ["2026-01-02", "2027-02-05"]
