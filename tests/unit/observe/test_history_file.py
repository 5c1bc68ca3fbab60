"""A file that cannot be used never stops a server: figures are kept in memory, or in a new file."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tonle.observe import history_file
from tonle.observe.history import History
from tonle.observe.history_file import VERSION
from tonle.observe.sample import Sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "history.db"


def opened(path: Path) -> History:
    history = History(path)
    history.open()
    return history


def add(history: History, count: int, *, ago_s: int = 1) -> None:
    """Seconds with one request each, the last one `ago_s` ago."""
    first = int(time.time()) - ago_s - count + 1
    for t in range(first, first + count):
        history.add(Sample(t, requests=1))


def num_known(history: History, range_s: int = 3600) -> int:
    """Seconds that are not null."""
    return sum(value is not None for value in history.series(range_s, range_s)["series"]["requests_per_s"])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def works(history: History) -> bool:
    add(history, 10)
    return num_known(history) == 10 and history.save() and num_known(history) == 10


def test_only_its_owner_reads_it(path: Path) -> None:
    history = opened(path)
    assert works(history) and history.kind == "file"
    assert path.stat().st_mode & 0o077 == 0
    history.file.close()


def test_what_was_saved_outlives_a_process_that_is_killed(path: Path) -> None:
    program = (
        "import sys, os, time; from pathlib import Path; from tonle.observe.history import History; "
        "from tonle.observe.sample import Sample; h = History(Path(sys.argv[1])); h.open(); t = int(time.time()); "
        "[h.add(Sample(t - 90 + n, requests=1)) for n in range(60)]; assert h.save(); h.add(Sample(t)); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == 9
    history = opened(path)
    assert history.kind == "file" and num_known(history) == 60
    add(history, 3)
    assert num_known(history) == 63, "with a gap between the two"
    history.file.close()


def test_a_file_of_another_process_is_left_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = opened(path)
    second = opened(path)
    assert second.kind == "memory" and works(second) and works(first)
    assert len(warnings(caplog)) == 1 and "another process uses it" in warnings(caplog)[0]
    first.file.close()
    third = opened(path)
    assert third.kind == "file" and num_known(third) == 10
    third.file.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    history = opened(tmp_path / "file" / "history.db")
    assert history.kind == "memory" and works(history)
    assert len(warnings(caplog)) == 1 and "kept in memory" in warnings(caplog)[0]


def test_what_is_no_database_is_moved_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_bytes(b"something else" * 1000)
    history = opened(path)
    assert history.kind == "file" and works(history)
    (aside,) = path.parent.glob("history.db.damaged-*")
    assert aside.read_bytes() == b"something else" * 1000
    assert len(warnings(caplog)) == 1 and aside.name in warnings(caplog)[0]
    history.file.close()


def test_a_file_with_damaged_pages_is_moved_aside(path: Path) -> None:
    history = opened(path)
    add(history, 3000)
    assert history.save()
    history.file.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:8192] + os.urandom(len(whole) - 16384) + whole[-8192:])
    after = opened(path)
    assert after.kind == "file" and works(after)
    assert len(list(path.parent.glob("history.db.damaged-*"))) == 1
    after.file.close()


def test_a_file_of_another_version_is_kept(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = opened(path)
    history.file.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (VERSION,)
        db.execute("PRAGMA user_version=99")
    db.close()
    after = opened(path)
    assert after.kind == "file" and works(after)
    assert path.with_name("history.db.version-99").exists() and "another version" in warnings(caplog)[0]
    after.file.close()


def test_a_full_disk_loses_nothing_once_there_is_room(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = opened(path)

    def bound(pages: int) -> None:
        history.file.read(lambda db: db.execute(f"PRAGMA max_page_count={pages}").fetchone(), None)

    bound(1)  # as many as there are
    add(history, 2000)
    assert not history.save() and not history.save() and num_known(history) == 2000
    assert len(warnings(caplog)) == 1 and "full" in warnings(caplog)[0]
    bound(1_000_000)
    assert history.save()
    history.file.close()
    after = opened(path)
    assert num_known(after) == 2000
    after.file.close()


def num_rows(history: History, table: str = "seconds") -> int:
    return history.file.read(lambda db: int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]), -1)


@pytest.mark.parametrize("wrong_s", [-1_000_000_000.0, 1_000_000_000.0])
def test_a_machine_that_starts_with_a_wrong_clock_drops_nothing_until_it_is_set(path: Path, wrong_s: float) -> None:
    history = opened(path)
    add(history, 5)
    assert history.save()
    history.file.close()
    passed_s = 0.0
    clock = {"off": wrong_s}
    history = History(path, clock=lambda: time.time() + passed_s + clock["off"], monotonic=lambda: passed_s)
    history.open()
    for passed_s in (10.0, 20.0):
        add(history, 1, ago_s=-int(wrong_s + passed_s))
        assert history.save()
    assert num_rows(history) == 7
    clock["off"] = 0.0
    add(history, 1, ago_s=-30)
    passed_s = 30.0
    assert history.save() and num_rows(history) == 8, "it has just been set"
    passed_s = 30.0 + history_file.STEADY_S
    add(history, 1, ago_s=-int(passed_s))
    assert history.save() and num_rows(history) == 7, "rows of the wrong clock are gone, old and future ones"
    assert num_known(history) == 7
    history.file.close()


def test_a_clock_that_is_set_back_a_little_keeps_the_hour_before(path: Path) -> None:
    history = History(path, clock=lambda: 1_700_002_900.0)
    history.open()
    for t in range(1_700_002_700, 1_700_002_810):  # 1_700_002_800 begins an hour
        history.add(Sample(t, requests=1))
    assert history.save()
    history.add(Sample(1_700_002_798, requests=1))
    assert history.save()
    hours = history.series(2 * 3600, 2)["series"]["requests_per_s"]
    assert hours == [1.0, 1.0] and num_rows(history, "hours") == 2
    minutes = history.file.read(lambda db: history._rings[1].rows(db, 1_700_002_740, 1_700_002_741), {})
    assert msgspec.msgpack.decode(minutes[1_700_002_740], type=Sample).requests == 60
    history.file.close()


def test_a_month_is_read_by_hours() -> None:
    history = History(None, clock=lambda: 1_700_010_001.0)  # 1_700_010_000 begins an hour
    for t in range(1_700_002_801, 1_700_010_001):
        history.add(Sample(t, requests=1))
    month = history.series(2_592_000)
    assert month["step"] == 3600 and len(month["t"]) == 720
    assert [value for value in month["series"]["requests_per_s"] if value is not None] == [1] * 3
    day = history.series(86_400)
    assert day["step"] == 120 and len(day["t"]) == 720
    assert history.series(3600)["step"] == 5 and history.series(300)["step"] == 1


def test_a_server_that_restarts_within_a_second_adds_to_it(path: Path) -> None:
    for number in (1, 2):
        history = History(path, clock=lambda: 1_700_000_000.5)
        history.open()
        history.add(Sample(1_700_000_000, requests=3))
        assert history.series(1, 1)["series"]["requests_per_s"] == [3 * number]
        assert history.save()
        history.file.close()


def test_a_figure_that_cannot_be_written_is_complained_about(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = opened(path)
    history.add(Sample(int(time.time()) - 1, prefix_hits=1 << 70))
    assert not history.save() and not history.save()
    assert len(warnings(caplog)) == 1
    history.file.close()


def test_the_database_of_something_else_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for version in (0, 1, 7):
        path = tmp_path / f"keys-{version}.db"
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE keys (id TEXT)")
            db.execute(f"PRAGMA user_version={version}")
        db.close()
        before = path.read_bytes()
        history = opened(path)
        assert history.kind == "memory" and works(history)
        assert "other tables" in warnings(caplog)[-1]
        assert [found.read_bytes() for found in tmp_path.glob(f"keys-{version}*")] == [before]
