"""What keys used, by day and model."""

from __future__ import annotations

import sqlite3
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
    usage.count([seen(cost=0.25)])
    usage.count([seen(status="failed", completion_tokens=1)])
    assert save(history, usage)
    usage.count([seen(cost=0.5, key_name="alice 2")])
    usage.count([seen(model="other")])
    usage.count([seen(key_id="k2", key_name="bob")])
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


def test_sound_and_images_add_up_too(history: History) -> None:
    usage = Usage(history.file)
    usage.count([seen(audio_s=1.5, characters=20)])
    assert save(history, usage)
    usage.count([seen(audio_s=0.25, images=3)])
    usage.count([seen(status="cached", audio_s=9.0, images=9)])
    for _ in range(2):
        (row,) = usage.rows("2026-01-01", "2026-01-01")
        assert (row.requests, row.audio_s, row.characters, row.images) == (3, 1.75, 20, 3)
        assert save(history, usage)


def test_a_file_from_before_sound_and_images_goes_on(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "h.db")
    db.executescript("""
        CREATE TABLE seconds (t INTEGER PRIMARY KEY, sample BLOB NOT NULL);
        CREATE TABLE minutes (t INTEGER PRIMARY KEY, sample BLOB NOT NULL);
        CREATE TABLE hours (t INTEGER PRIMARY KEY, sample BLOB NOT NULL);
        CREATE TABLE usage (
            day TEXT, key_id TEXT, model TEXT, key_name TEXT NOT NULL, requests INTEGER NOT NULL, failed INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
            device_s REAL NOT NULL, cost REAL, PRIMARY KEY (day, key_id, model)
        ) WITHOUT ROWID;
        INSERT INTO usage VALUES ('2026-01-01', 'k1', 'm', 'alice', 2, 0, 30, 1, 7, 0.5, 0.25);
        PRAGMA user_version=1;
    """)
    db.close()
    history = History(tmp_path / "h.db")
    usage = Usage(history.file)
    usage.count([seen(audio_s=2.0)])
    assert save(history, usage)
    (row,) = usage.rows("2026-01-01", "2026-01-01")
    assert (row.requests, row.prompt_tokens, row.audio_s, row.cost) == (3, 40, 2.0, 0.25)
    assert not history.file.in_memory and [path.name for path in tmp_path.iterdir() if "version" in path.name] == []


def test_days_are_those_of_utc_and_of_the_range(history: History) -> None:
    usage = Usage(history.file)
    for number in range(3):
        usage.count([seen(arrived=MORNING + number * DAY_S)])
    usage.count([seen(arrived=MORNING + 15.999 * 3600)])
    assert [(row.day, row.requests) for row in usage.rows("2026-01-01", "2026-01-02")] == [
        ("2026-01-01", 2),
        ("2026-01-02", 1),
    ]


def test_a_cached_answer_is_a_request_without_tokens(history: History) -> None:
    usage = Usage(history.file)
    usage.count([seen(status="cached", cost=1.0)])
    (row,) = usage.rows("2026-01-01", "2026-01-01")
    assert row.requests == 1 and row.prompt_tokens == row.completion_tokens == 0 and row.cost is None


def test_callers_cannot_fill_the_file_with_names(history: History) -> None:
    usage = Usage(history.file)
    for number in range(100):
        usage.count([seen(model=f"invented-{number}", status="refused", accepted_s=None)])
    (row,) = usage.rows("2026-01-01", "2026-01-01")
    assert row.model == "" and row.requests == 100


def test_refusals_of_unknown_callers_are_nobodys_usage(history: History) -> None:
    usage = Usage(history.file)
    usage.count([seen(status="refused", accepted_s=None, key_id="", key_name=""), seen()])
    (row,) = usage.rows("2026-01-01", "2026-01-01")
    assert row.key_id == "k1" and row.requests == 1


def test_it_survives_a_restart_and_a_failed_save(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage(history.file)
    usage.count([seen()])
    with monkeypatch.context() as broken:
        broken.setattr("tonle.observe.usage._UPSERT", "INSERT INTO nowhere VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)")
        assert not save(history, usage)
    usage.count([seen()])
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
        usage.count([seen(arrived=MORNING + number * DAY_S)])
    assert save(history, usage)
    assert len(usage.rows("2026-01-01", "2028-01-01")) == 3, "the clock may be wrong: nothing is dropped yet"
    monkeypatch.setattr(history_file, "STEADY_S", 0.0)
    usage.count([seen(arrived=MORNING + 400 * DAY_S)])
    assert save(history, usage)
    assert [row.day for row in usage.rows("2026-01-01", "2028-01-01")] == ["2026-01-02", "2027-02-05"]
