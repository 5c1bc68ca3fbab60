"""`kill -9` at any moment, then a restart: the chain verifies, no torn file counts, no request is forgotten."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.audit.trails import ask, files, pending_record, records, running, write_days
from tonle.audit import day_ledger
from tonle.audit.audit_options import KEY_NAME
from tonle.audit.chain import Chain
from tonle.audit.disk import TEMP_PREFIX
from tonle.audit.recover import recover
from tonle.audit.retention import redact_records, removing
from tonle.audit.signing_keys import load_key
from tonle.audit.verify import verify

WRITER = """
import json, sys, time
from pathlib import Path
from tonle.audit import AuditOptions, AuditTrail
trail = AuditTrail(AuditOptions(directory=Path(sys.argv[1]), fsync="never", linger_s=float(sys.argv[2]), min_free_bytes=0))
trail.start()
number = 0
while True:
    record = trail.open("/v1/chat/completions", request_id=f"{sys.argv[3]}-{number}", body=b'{"messages": []}')
    print(record.request_id, flush=True)
    if number % 5 != 4:  # some stay open
        record.close("ok", http_status=200, output="x" * 2000)
    number += 1
    time.sleep(0.0005)
"""


def kill_one(directory: Path, linger_s: float, name: str, num_requests: int, delay_s: float) -> list[str]:
    """Start a writer, let it open so many requests, kill it. Returns their ids."""
    command = [sys.executable, "-c", WRITER, str(directory), str(linger_s), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        opened = [process.stdout.readline().strip() for _ in range(num_requests)]
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        opened += process.stdout.read().split()
    return opened


def test_killed_writers_leave_one_record_per_request(tmp_path: Path) -> None:
    chance = random.Random(5)
    opened: list[str] = []
    for round_number in range(6):
        linger_s = chance.choice([0.0, 0.005, 0.05])
        opened += kill_one(tmp_path, linger_s, f"r{round_number}", chance.randrange(1, 60), chance.random() / 100)
    with running(tmp_path) as trail:
        ask(trail)
    report = verify(tmp_path)
    assert report.ok, report.findings
    written = [record["request_id"] for record in records(tmp_path)]
    assert len(written) == len(set(written)), "never two"
    # A line printed is a request opened; the very last may have been opened and not printed.
    assert set(opened) <= set(written)
    assert len(written) - len(set(opened)) <= 1 + 6
    assert {record["status"] for record in records(tmp_path)} == {"ok", "interrupted"}
    assert not list(tmp_path.rglob(f"{TEMP_PREFIX}*"))


def test_two_writers_and_one_is_killed(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        ask(trail)
        opened = kill_one(tmp_path, 0.0, "other", 20, 0.0)
        ask(trail)
    with running(tmp_path) as trail:
        ask(trail)
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert set(opened) <= {record["request_id"] for record in records(tmp_path)}


def reopen(directory: Path) -> Chain:
    return Chain(directory, load_key(directory / KEY_NAME))


def test_a_temporary_file_is_no_record(tmp_path: Path) -> None:
    write_days(tmp_path, {"2025-01-31": 2})
    torn = tmp_path / "2025-01-31" / f"{TEMP_PREFIX}chat_completions_x_y.json"
    torn.write_text('{"half')
    assert verify(tmp_path).ok
    assert recover(reopen(tmp_path)) == {}
    assert not torn.exists()


@pytest.mark.parametrize("stage", ["file", "half a line", "line"])
def test_a_batch_cut_short_is_taken_over(tmp_path: Path, stage: str) -> None:
    """Each state between the file, its line and the signed head."""
    chain = write_days(tmp_path, {"2025-01-31": 2})
    path = chain.ledger("2025-01-31")
    before = path.read_bytes()
    chain.append([pending_record("2025-01-31", output="third")])  # and no `sign`
    if stage != "line":
        whole = path.read_bytes()
        path.write_bytes(before if stage == "file" else whole[: (len(before) + len(whole)) // 2])
    assert not verify(tmp_path).ok
    notes = recover(reopen(tmp_path))
    assert ("entered" in notes) == (stage != "line")
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert [record["output"] for record in records(tmp_path)] == ["answer 0", "answer 1", "third"]
    assert recover(reopen(tmp_path)) == {}, "once is enough"


def test_a_file_cut_by_a_power_failure_is_put_aside_and_named(tmp_path: Path) -> None:
    write_days(tmp_path, {"2025-01-31": 2})
    path = tmp_path / "2025-01-31" / "chat_completions_abcdabcd_20250131T000000000000Z.json"
    path.write_bytes(b"")
    notes = recover(reopen(tmp_path))
    assert notes["torn"] == [f"2025-01-31/{path.name}"]
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert any("torn" in note for note in report.notes)


def test_a_line_whose_file_never_reached_the_disk_is_cut_and_noted(tmp_path: Path) -> None:
    chain = write_days(tmp_path, {"2025-01-31": 2})
    chain.append([pending_record("2025-01-31", output="third")])
    files(tmp_path)[-1].unlink()
    notes = recover(reopen(tmp_path))
    assert notes["cut"]["after_seq"] == 2
    assert verify(tmp_path).ok
    assert len(records(tmp_path)) == 2


def test_a_day_that_was_only_opened_is_no_loss(tmp_path: Path) -> None:
    chain = write_days(tmp_path, {"2025-01-31": 2})
    chain._open_day("2025-02-01")
    assert verify(tmp_path).ok
    again = reopen(tmp_path)
    assert recover(again) == {}
    again.append([pending_record("2025-02-02")])
    again.sign()
    report = verify(tmp_path)
    assert report.ok, report.findings


@pytest.mark.parametrize("is_signed", [False, True])
def test_a_redaction_is_finished_or_never_happened(
    tmp_path: Path, is_signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = write_days(tmp_path, {"2025-01-31": 2})
    path = files(tmp_path)[0]

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    chain.append([pending_record(day_ledger.today())])  # today is open, so that only the redaction itself is cut short
    chain.sign()
    monkeypatch.setattr(*((Path, "rename") if is_signed else (Chain, "sign_locked")), die)
    with pytest.raises(KeyboardInterrupt):
        redact_records(chain, [path], removing(["user_input"]), reason="test")
    monkeypatch.undo()
    assert "dara@example.org" in path.read_text(), "not yet"
    recover(reopen(tmp_path))
    assert (json.loads(path.read_text())["user_input"] == "[redacted]") == is_signed
    report = verify(tmp_path)
    assert report.ok, report.findings


def test_a_limit_on_file_size_is_a_full_disk(tmp_path: Path) -> None:
    """The real thing, refused by the kernel: RLIMIT_FSIZE stops the ledger from growing."""
    script = """
import resource, sys, time
from pathlib import Path
import tonle.audit.trail as module
from tonle.audit import AuditOptions, AuditTrail
from tonle.errors import CapacityError
module.RETRY_S = 0.01
trail = AuditTrail(AuditOptions(directory=Path(sys.argv[1]), fsync="never", linger_s=0.0, min_free_bytes=0))
trail.start()
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
admitted = refused = 0
for number in range(10_000):
    try:
        trail.admit()
    except CapacityError:
        refused += 1
        break
    trail.open("/v1/completions").close("ok", http_status=200)
    admitted += 1
    trail.flush(0.05)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert trail.flush(20)
trail.close()
assert trail.stats.written == admitted and refused == 1 and admitted > 10, trail.stats
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = verify(tmp_path)
    assert report.ok, report.findings


def test_an_intent_without_our_mark_makes_no_record(tmp_path: Path) -> None:
    write_days(tmp_path, {"2025-01-31": 1})
    (tmp_path / "open").mkdir(exist_ok=True)
    forged = json.dumps(["deadbeef", 0, "/v1/x", "forged", None, None]).encode()
    (tmp_path / "open" / "1-x-1.log").write_bytes(
        hashlib.sha256(forged).hexdigest().encode() + b" " + forged + b"\n\0\0"
    )
    assert recover(reopen(tmp_path)) == {}
    assert len(records(tmp_path)) == 1


def test_many_requests_turn_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.audit.intents.FILE_BYTES", 4096)
    with running(tmp_path) as trail:
        for _ in range(100):
            ask(trail)
            assert trail.flush()
        trail.open("/v1/x", body=b"x" * 10_000)  # larger than a page: kept in memory only
        assert len(list((tmp_path / "open").iterdir())) <= 3
    assert verify(tmp_path).num_records == 101
    assert not list((tmp_path / "open").iterdir())
