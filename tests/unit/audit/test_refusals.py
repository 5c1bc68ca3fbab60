"""Refused requests: what a record keeps of them, how many get one, and what the chain says of the others."""

from __future__ import annotations

import hashlib
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.audit.test_writer_process import apart
from tests.unit.audit.trails import CHAT, ask, records, running, wait_for
from tonle.audit import AuditOptions, AuditTrail, BodySummary
from tonle.audit.refusal_cap import MAX_ROWS, OTHERS, Counted
from tonle.audit.verify import verify
from tonle.errors import CapacityError

TRAILS = pytest.mark.parametrize("start", [running, apart], ids=["thread", "process"])
BIG = b'{"prompt": "' + b"x" * 300_000 + b'"}'


def refuse(
    trail: AuditTrail, address: str = "10.0.0.7", *, body: bytes | None = None, key: bool = False, **more: Any
) -> None:
    record = trail.open(CHAT, client=address, body=body, **more)
    record.unauthenticated = not key
    record.close("refused", http_status=401, error={"code": "invalid_api_key", "message": "unknown"})


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@TRAILS
@pytest.mark.parametrize("is_known", [False, True])
def test_of_a_long_refused_body_the_beginning_the_length_and_the_hash_are_kept(
    tmp_path: Path, start: Any, is_known: bool
) -> None:
    with start(tmp_path) as trail:
        refuse(trail, body=BIG, key=is_known)
    [record] = records(tmp_path)
    assert record["parameters"]["body"] == {
        "declared_bytes": len(BIG),
        "received_bytes": len(BIG),
        "sha256": hashlib.sha256(BIG).hexdigest(),
        "first": BIG[:2048].decode(),
    }
    assert verify(tmp_path).ok


@pytest.mark.parametrize(("is_known", "size", "is_whole"), [(False, 2_000, True), (False, 2_100, False),
                                                           (True, 60_000, True), (True, 70_000, False)])  # fmt: skip
def test_how_long_a_refused_body_may_be_to_be_kept_whole(
    tmp_path: Path, is_known: bool, size: int, is_whole: bool
) -> None:
    with running(tmp_path) as trail:
        refuse(trail, body=b'{"prompt":"' + b"x" * (size - 13) + b'"}', key=is_known)
    [record] = records(tmp_path)
    assert (record["prompt"] is not None) is is_whole


@TRAILS
def test_a_body_that_was_not_read_is_told_as_far_as_it_came(tmp_path: Path, start: Any) -> None:
    with start(tmp_path) as trail:
        refuse(trail, unread=BodySummary(8_000_000, 3, b"{\xffx", "ab" * 32))
    [record] = records(tmp_path)
    told = {"declared_bytes": 8_000_000, "received_bytes": 3, "sha256": "ab" * 32, "first": "{�x"}
    assert record["parameters"] == {"body": told}


@TRAILS
def test_a_flood_of_unknown_callers_is_counted_and_neighbours_are_recorded(
    tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonle.audit.refusal_cap.time", SimpleNamespace(monotonic=lambda: 5.0))
    with start(tmp_path, refused_per_address=3, refused_per_second=5) as trail:
        for number in range(300):
            refuse(trail, f"10.0.0.{number % 3}", body=BIG)
        ask(trail, output="in between")
        refuse(trail, "10.9.9.9", key=True)  # a caller that is known
        assert trail.flush(60)
        assert trail.stats.unrecorded == 295
    written = records(tmp_path)
    assert len(written) == 5 + 2
    assert disk_bytes(tmp_path) < 200_000
    report = verify(tmp_path)
    assert report.ok, report.findings
    told = "; ".join(report.notes)
    assert " (401, invalid_api_key) between 2" in told and " were not recorded one by one" in told
    for address, number in (("10.0.0.0", 98), ("10.0.0.1", 98), ("10.0.0.2", 99)):
        assert sum(map(int, re.findall(rf"(\d+) refused requests of {address}", told))) == number, told


def test_the_next_second_has_records_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 5.0
    monkeypatch.setattr("tonle.audit.refusal_cap.time", SimpleNamespace(monotonic=lambda: now_s))
    with running(tmp_path, refused_per_address=2) as trail:
        for _ in range(3):
            refuse(trail)
        now_s = 6.0
        refuse(trail)
        assert trail.flush(60)
        assert (trail.stats.written, trail.stats.unrecorded) == (3, 1)


def test_zero_records_of_unknown_callers_still_counts_them(tmp_path: Path) -> None:
    with running(tmp_path, refused_per_address=0) as trail:
        refuse(trail)
    assert not records(tmp_path)
    assert "1 refused requests of 10.0.0.7" in verify(tmp_path).notes[0]


def test_the_table_of_addresses_is_bounded(tmp_path: Path) -> None:
    trail = AuditTrail(AuditOptions(directory=tmp_path))
    counted = Counted()
    for number in range(5000):
        record = trail.open(CHAT, client=f"10.{number // 256}.{number % 256}.1")
        record._written = None
        record.http_status = 401
        counted.add(record)
    rows = counted.facts()
    assert len(rows) == MAX_ROWS + 1
    assert rows[-1]["client"] == OTHERS
    assert sum(row["requests"] for row in rows) == 5000


def test_counted_addresses_are_masked_like_recorded_ones(tmp_path: Path) -> None:
    with running(tmp_path, refused_per_address=0, redact=("ipv4",)) as trail:
        refuse(trail, "203.0.113.7")
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"203.0.113.7" not in everything
    assert "requests of [ipv4]" in verify(tmp_path).notes[0]


KILLED = """
import os, signal, sys
from pathlib import Path
from tonle.audit import AuditOptions, AuditTrail
trail = AuditTrail(AuditOptions(directory=Path(sys.argv[1]), fsync="never", min_free_bytes=0, refused_per_address=1))
trail._gaps._told_s = 1e12  # not before the test says so
trail.start()
for number in range(4):
    record = trail.open("/v1/chat/completions", request_id=f"r{number}", client="10.0.0.7")
    record.unauthenticated = True
    record.close("refused", http_status=401)
assert trail.flush(60)
if sys.argv[2] == "told":
    import time
    trail._gaps._told_s = -1e9
    while trail._cap.has_counted or trail._gaps._counted is not None:
        time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("state", ["told", "not told"])
def test_kill_9_loses_no_count(tmp_path: Path, state: str) -> None:
    """What the chain does not count yet, recovery records one by one; what it does count, recovery leaves alone."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), state], check=False)
    assert done.returncode == -signal.SIGKILL
    with running(tmp_path):
        pass
    counted = sum("refused requests of 10.0.0.7" in note for note in verify(tmp_path).notes)
    statuses = sorted(record["status"] for record in records(tmp_path))
    if state == "told":
        assert (counted, statuses) == (1, ["refused"])
    else:
        assert (counted, statuses) == (0, ["interrupted"] * 3 + ["refused"])
    assert verify(tmp_path).ok


# -- bytes that wait


def test_bytes_that_wait_are_bounded(tmp_path: Path) -> None:
    trail = AuditTrail(AuditOptions(directory=tmp_path, max_memory_bytes=1_000_000))  # not started: nothing empties it
    body = {"prompt": "x" * 100_000}
    for _ in range(5):
        ask(trail, body=body)
    assert trail.crowded
    trail.admit()
    for _ in range(5):
        ask(trail, body=body)
    with pytest.raises(CapacityError, match="bytes of records are waiting"):
        trail.admit()
    for _ in range(50):
        refuse(trail, body=b"x" * 60_000, key=True)
    assert (trail.stats.lost, trail.num_queued) == (50, 10)
    assert trail.num_queued_bytes < 1_200_000


@TRAILS
def test_what_is_written_no_longer_counts(tmp_path: Path, start: Any) -> None:
    with start(tmp_path) as trail:
        for _ in range(10):
            ask(trail, body={"prompt": "x" * 100_000})
        assert trail.flush(60)
        wait_for(lambda: trail.num_queued_bytes == 0)


def test_batches_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.audit.record_queue.MAX_BATCH_BYTES", 250_000)
    with running(tmp_path, linger_s=0.2) as trail:
        assert trail._writer is not None
        write, sizes = trail._writer.write, list[int]()

        def measured(batch: Any, lost: Any, *, again: bool = False) -> None:
            sizes.append(len(batch))
            write(batch, lost, again=again)

        trail._writer.write = measured  # type: ignore[method-assign]
        for _ in range(20):
            ask(trail, body={"prompt": "x" * 100_000})
        assert trail.flush(60)
    assert max(sizes) <= 4
    assert len(records(tmp_path)) == 20


def test_open_requests_are_remembered_without_bodies_while_they_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonle.audit.intents.MAX_PAGES", 2)
    with running(tmp_path) as trail:
        opened = [trail.open(CHAT, body=b"x" * 60_000) for _ in range(300)]  # 18 MB of bodies
        assert disk_bytes(tmp_path / "open") < 14_000_000
        for record in opened:
            record.close("ok", http_status=200)
    assert len(records(tmp_path)) == 300


@TRAILS
def test_an_answer_without_end_is_cut_and_says_so(tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.audit.shorten.MAX_ANSWER_CHARS", 10_000)
    monkeypatch.setattr("tonle.audit.shorten.KEPT_CHARS", 100)
    monkeypatch.setattr("tonle.audit.writer_client.LONG_BYTES", 10_000)
    with start(tmp_path) as trail:
        ask(trail, output="y" * 20_000)
        ask(trail, output="z" * 9_000)
    cut, whole = records(tmp_path)
    digest = hashlib.sha256(b"y" * 20_000).hexdigest()
    assert cut["output"] == f"{'y' * 100} [cut: 20000 characters in all, SHA-256 {digest}]"
    assert whole["output"] == "z" * 9_000
