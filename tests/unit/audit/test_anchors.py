"""The end of the chain is noted outside the directory, and a trail that lost it is found without being asked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.unit.audit.trails import ask, files, pending_record, running, wait_for, write_days
from tonle.audit import anchor_file, anchor_keeper, day_ledger, known_trails
from tonle.audit.anchor_keeper import AnchorKeeper
from tonle.audit.audit_options import KEY_NAME, AuditOptions
from tonle.audit.chain import Chain
from tonle.audit.ledger_reader import end_of_link, ends_with_link
from tonle.audit.retention import prune_days
from tonle.audit.signing_keys import load_key
from tonle.audit.verify import verify
from tonle.cli.app import app


def tonle(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def problems(directory: Path, **options: Path) -> set[str]:
    return {finding.problem for finding in verify(directory, **options).findings}  # type: ignore[arg-type]


def serve(directory: Path, num_requests: int, **options: object) -> None:
    """A server that runs for a while and stops."""
    with running(directory, **options) as trail:
        for _ in range(num_requests):
            ask(trail)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "audit"


@pytest.fixture
def rolled_back(directory: Path, tmp_path: Path) -> Path:
    """The last day, head and ledger and records, as it was some requests ago."""
    serve(directory, 2)
    day = day_ledger.days_in(directory)[-1]
    copy = shutil.copytree(directory / day, tmp_path / "copy")
    serve(directory, 3)
    if day_ledger.days_in(directory)[-1] != day:
        pytest.skip("the day has changed meanwhile")
    assert tonle("verify", directory).exit_code == 0
    shutil.rmtree(directory / day)
    shutil.copytree(copy, directory / day)
    return directory


def test_the_last_day_rolled_back_alone_is_found(rolled_back: Path) -> None:
    done = tonle("verify", rolled_back)
    assert done.exit_code == 1, done.output
    day = day_ledger.days_in(rolled_back)[-1]
    assert done.stdout.startswith(f"rollback: {day}/{day_ledger.LEDGER_NAME}: line 5, noted at ")
    assert tonle("verify", rolled_back, "--day", day).exit_code == 1


def test_the_evidence_of_a_rollback_outlives_restarts_and_new_records(
    rolled_back: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noted = known_trails.find(rolled_back)
    serve(rolled_back, 9)  # longer than it ever was
    assert "is not in the chain any more" in caplog.text
    assert known_trails.find(rolled_back) == noted
    assert "rollback" in problems(rolled_back)
    assert tonle("trust", rolled_back).exit_code == 0
    assert tonle("verify", rolled_back).exit_code == 0


def test_a_whole_directory_put_back_or_emptied_is_found(directory: Path, tmp_path: Path) -> None:
    serve(directory, 2)
    copy = shutil.copytree(directory, tmp_path / "copy")
    serve(directory, 1)
    shutil.rmtree(directory)
    shutil.copytree(copy, directory)
    assert problems(directory) == {"rollback"}
    shutil.rmtree(directory)
    directory.mkdir()
    assert "rollback" in problems(directory)
    serve(directory, 5)  # makes a new key and a new trail
    assert {"key", "rollback"} <= problems(directory)


def test_a_server_notes_while_it_runs_and_when_it_stops(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor_keeper, "ANCHOR_EVERY_S", 0.01)

    def noted() -> int:
        known = known_trails.find(directory)
        return 0 if known is None or known.head is None else known.head.seq

    with running(directory) as trail:
        for _ in range(3):
            ask(trail)
        assert trail.flush()
        wait_for(lambda: noted() == 3)
        monkeypatch.setattr(anchor_keeper, "ANCHOR_EVERY_S", 3600.0)
        ask(trail)
    assert noted() == 4
    assert verify(directory).anchors == ["the state directory"]


CHILD = """
import os, sys, time
from pathlib import Path
from tests.unit.audit.trails import ask, running
from tonle.audit import anchor_keeper
anchor_keeper.ANCHOR_EVERY_S = 0.002
with running(Path(sys.argv[1])) as trail:
    print("ready", flush=True)
    while True:
        ask(trail)
        time.sleep(0.001)
"""


def test_kill_9_never_leaves_a_finding(directory: Path) -> None:
    """The note may be behind the chain, never ahead of it."""
    for number in range(4):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(directory)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        wait_for(lambda want=20 * (number + 1): len(files_of_today(directory)) > want)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert "rollback" not in problems(directory)
        serve(directory, 1)  # repairs
        report = verify(directory)
        assert report.ok, report.findings
        assert report.anchors == ["the state directory"]


def files_of_today(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*-*-*/*_*.json") if not path.name.startswith(".")]


def test_pruned_days_are_no_rollback(directory: Path, tmp_path: Path) -> None:
    """Also if the day that was noted last is one of them."""
    write_days(directory_made(directory), {"2025-01-30": 2, "2025-01-31": 2})
    key = load_key(directory / KEY_NAME)
    notes = tmp_path / "notes"
    keeper = AnchorKeeper(AuditOptions(directory=directory, anchor=notes), key)
    keeper.advance()
    known = known_trails.find(directory)
    assert known is not None and known.head is not None and known.head.day == "2025-01-31"
    chain = Chain(directory, key)
    chain.append([pending_record(day_ledger.today())])
    chain.sign()
    assert prune_days(chain, 7) == ["2025-01-30", "2025-01-31"]
    assert verify(directory, anchor_path=notes).ok
    keeper.advance()
    known = known_trails.find(directory)
    assert known is not None and known.head is not None and known.head.day >= day_ledger.today()
    assert verify(directory, anchor_path=notes).ok
    serve(directory, 2, retention_days=7)
    assert verify(directory).ok


def directory_made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def test_a_removed_day_is_not_taken_for_a_pruned_one(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_days(directory_made(directory), {"2025-01-30": 2, "2025-01-31": 2})
    keeper = AnchorKeeper(AuditOptions(directory=directory), load_key(directory / KEY_NAME))
    keeper.advance()
    shutil.rmtree(directory / "2025-01-31")
    keeper.advance()
    assert "is not in the chain any more" in caplog.text
    assert "rollback" in problems(directory)


def test_a_note_of_another_process_that_is_ahead_stays(directory: Path) -> None:
    write_days(directory_made(directory), {"2025-01-30": 3})
    key = load_key(directory / KEY_NAME)
    slow = AnchorKeeper(AuditOptions(directory=directory), key)
    slow.advance()
    known = known_trails.find(directory)
    assert known is not None and known.head is not None
    chain = Chain(directory, key)
    chain.append([pending_record("2025-01-30")])
    chain.sign()
    AnchorKeeper(AuditOptions(directory=directory), key).advance()
    slow._move(known, known.head)  # what it read before the other one moved on
    after = known_trails.find(directory)
    assert after is not None and after.head is not None and after.head.seq == 4


# -- the file of `audit_anchor`


def test_a_file_elsewhere_is_appended_to_and_compared_with(directory: Path, tmp_path: Path) -> None:
    notes = tmp_path / "elsewhere" / "anchors"
    notes.parent.mkdir()
    serve(directory, 2, anchor=notes)
    copy = shutil.copytree(directory, tmp_path / "copy")
    serve(directory, 3, anchor=notes)
    assert [json.loads(line)["seq"] for line in notes.read_text().splitlines()][-1] == 5
    assert verify(directory, anchor_path=notes).anchors == ["the state directory", str(notes)]
    known_trails.path_of(directory).unlink()  # another machine, or another user
    assert tonle("verify", copy).exit_code == 0, "alone it is in order"
    done = tonle("verify", copy, "--anchor-file", notes)
    assert done.exit_code == 1 and "rollback: " in done.stdout
    serve(copy, 9, anchor=notes)  # goes on from there: the lines of both are in the file
    assert "rollback" in problems(copy, anchor_path=notes)


def test_lines_of_others_in_the_file_are_passed_over(directory: Path, tmp_path: Path) -> None:
    notes = tmp_path / "anchors"
    serve(directory, 2, anchor=notes)
    line = json.loads(notes.read_text().splitlines()[-1])
    with notes.open("ab") as file:
        file.write(b"junk\n\xff\n" + b"[" * 5000 + b"\n")
        file.write(json.dumps({**line, "seq": 99, "link": "f" * 64}).encode() + b"\n")
    assert verify(directory, anchor_path=notes).ok


@pytest.mark.parametrize("kind", ["missing", "empty", "fifo", "folder", "of another trail"])
def test_a_file_that_cannot_be_compared_with_is_a_finding(directory: Path, tmp_path: Path, kind: str) -> None:
    serve(directory, 1)
    notes = tmp_path / "anchors"
    if kind == "empty":
        notes.touch()
    elif kind == "fifo":
        os.mkfifo(notes)
    elif kind == "folder":
        notes.mkdir()
    elif kind == "of another trail":
        serve(tmp_path / "other", 1, anchor=notes)
    assert problems(directory, anchor_path=notes) == {"rollback"}


def test_without_a_place_for_state_the_file_is_still_written(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nothing")
    notes = tmp_path / "anchors"
    serve(directory, 2, anchor=notes)
    assert len(anchor_file.read_tail(notes)) >= 1
    assert "cannot be noted in the state directory" in caplog.text
    assert verify(directory, anchor_path=notes).ok


def test_a_file_that_cannot_be_written_does_not_stop_the_server(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serve(directory, 2, anchor=tmp_path / "nowhere" / "anchors")
    assert len(files(directory)) == 2 and "cannot be noted outside it" in caplog.text
    assert verify(directory).ok


# -- finding a line by its link


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    links = [f"{number:064x}" for number in range(40_000)]
    path = tmp_path / "ledger"
    path.write_bytes(b"".join(b'{"seq":%d,"link":"%b"}\n' % pair for pair in enumerate(map(str.encode, links))))
    yield path, links


def test_a_line_is_found_across_the_pieces_of_a_long_file(ledger: tuple[Path, list[str]]) -> None:
    path, links = ledger
    content = path.read_bytes()
    assert len(content) > 3 << 20
    for number in [0, 1, 39_999, *range(11_000, 12_500, 50), *range(11_900, 11_960)]:
        end = content.index(links[number].encode()) + 64 + len('"}\n')
        for start in (0, end - 80, end // 2 if end > 1000 else 0):
            assert end_of_link(path, max(0, start), links[number]) == end
        assert ends_with_link(path, end, links[number])
        assert not ends_with_link(path, end - 1, links[number])
    assert end_of_link(path, 0, "f" * 64) is None
    assert not ends_with_link(path, len(content) + 99, links[0])
    assert not ends_with_link(path / "nothing", 99, links[0])
