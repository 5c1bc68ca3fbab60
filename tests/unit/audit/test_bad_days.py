"""Writers that hang, processes that die again and again, disks that refuse, clocks that jump: the chain verifies."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.audit.test_trail import FullDisk
from tests.unit.audit.test_writer_process import apart, writer_process
from tests.unit.audit.trails import CHAT, ask, records, running, wait_for
from tonle.audit import Alarm, day_ledger
from tonle.audit.verify import verify
from tonle.audit.writer import WriterDiedError
from tonle.errors import CapacityError

DAY_NS = 86_400 * 10**9


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.audit.trail.RETRY_S", 0.02)
    monkeypatch.setattr("tonle.audit.trail.CHECK_S", 0.02)


def outputs(folder: Path) -> list[Any]:
    return [record["output"] for record in records(folder)]


def test_a_writer_that_is_stopped_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[Alarm] = []

    def hear(alarm: Alarm) -> None:
        monkeypatch.setattr("tonle.audit.writer_client.ANSWER_S", 60.0)  # the next one needs time to start
        alarms.append(alarm)

    with apart(tmp_path, on_alarm=hear) as trail:
        ask(trail, output="before")
        assert trail.flush(60)
        alarms.clear()
        monkeypatch.setattr("tonle.audit.writer_client.ANSWER_S", 0.5)
        stopped = writer_process()
        stopped.suspend()
        for number in range(5):
            ask(trail, output=f"during {number}")
        wait_for(lambda: alarms)
        assert alarms[0].kind == "failing"
        assert "did not answer" in alarms[0].message
        wait_for(lambda: trail.stats.failing is None)
        assert trail.flush(60)
        assert not psutil.pid_exists(stopped.pid)
        ask(trail, output="after")
    assert outputs(tmp_path) == ["before", *(f"during {number}" for number in range(5)), "after"]
    report = verify(tmp_path)
    assert report.ok, report.findings


def test_a_record_that_kills_writers_is_found_and_kept_short(tmp_path: Path) -> None:
    """Of many, only the one, and even of that its request is on record."""
    with apart(tmp_path, linger_s=0.1) as trail:
        writer = trail._writer
        assert writer is not None
        write = writer.write

        def dying(batch: Any, lost: Any, *, again: bool = False) -> None:
            if any(b"poison" in (record.packed or b"") for record in batch):
                raise WriterDiedError(errno.EPIPE, "it died")
            write(batch, lost, again=again)

        writer.write = dying  # type: ignore[method-assign]
        for number in range(3):
            ask(trail, output=f"good {number}")
        trail.open(CHAT, request_id="bad", body=b'{"prompt":"poison"}').close("ok", http_status=200)
        ask(trail, output="last")
        assert trail.flush(60)
    assert outputs(tmp_path) == ["good 0", "good 1", "good 2", None, "last"]
    bad = records(tmp_path)[3]
    assert (bad["request_id"], bad["status"]) == ("bad", "ok")
    assert bad["parameters"]["body"]["received_bytes"] == len(b'{"prompt":"poison"}')
    assert verify(tmp_path).ok


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.EDQUOT, errno.ENOSPC])
def test_whatever_a_disk_says_requests_are_refused_until_it_takes_records(tmp_path: Path, number: int) -> None:
    class Refusing(FullDisk):
        def _refuse(self) -> None:
            if self.is_full:
                raise OSError(number, os.strerror(number))

    disk = Refusing()
    with running(tmp_path, disk=disk) as trail:
        ask(trail, output="before")
        assert trail.flush()
        disk.is_full = True
        ask(trail, output="during")
        wait_for(lambda: trail.stats.failing)
        with pytest.raises(CapacityError, match=os.strerror(number)):
            trail.admit()
        disk.is_full = False
        wait_for(lambda: trail.stats.failing is None)
        ask(trail, output="after")
    assert outputs(tmp_path) == ["before", "during", "after"]
    assert verify(tmp_path).ok


class Clock:
    """The wall clock of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now_ns: int) -> None:
        self.now_ns = now_ns
        monkeypatch.setattr("time.time_ns", self.tick)
        monkeypatch.setattr(day_ledger, "today", lambda: day_ledger.text_of(self.now_ns)[:10])

    def tick(self) -> int:
        self.now_ns += 1000
        return self.now_ns


def test_a_clock_that_jumps_over_midnight_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1_769_990_399 * 10**9)  # one second before midnight
    with running(tmp_path) as trail:
        for number, jump_ns in enumerate((0, 2 * 10**9, -3 * 10**9, -DAY_NS, 5 * DAY_NS, -20 * DAY_NS)):
            clock.now_ns += jump_ns
            ask(trail, output=str(number))
            assert trail.flush()
    with running(tmp_path) as trail:
        ask(trail, output="after a restart")
    assert outputs(tmp_path) == ["0", "1", "2", "3", "4", "5", "after a restart"]
    report = verify(tmp_path)
    assert report.ok, report.findings


def test_a_clock_set_back_makes_no_second_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer died after it wrote and before it said so, and the clock was set back while the request ran."""
    clock = Clock(monkeypatch, 1_769_990_399 * 10**9)
    with running(tmp_path) as trail:
        assert trail._writer is not None
        write, num_calls = trail._writer.write, 0

        def forgetful(batch: Any, lost: Any, *, again: bool = False) -> None:
            nonlocal num_calls
            num_calls += 1
            write(batch, lost, again=again)
            if num_calls == 1:
                raise OSError(errno.EPIPE, "no receipt")

        trail._writer.write = forgetful  # type: ignore[method-assign]
        clock.now_ns += 3 * DAY_NS
        record = trail.open(CHAT)
        clock.now_ns -= 3 * DAY_NS
        record.close("ok", http_status=200, output="once")
        assert trail.flush()
    assert outputs(tmp_path) == ["once"]
    report = verify(tmp_path)
    assert report.ok, report.findings


def test_neighbours_of_a_record_that_cannot_be_sealed_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason: here, a fault put into the place where records are sealed."""
    from tonle.audit import chain

    def sealing(fields: Any, *args: Any, **more: Any) -> Any:
        if b"poison" in fields.text:
            raise RecursionError("for the test")
        return sealed(fields, *args, **more)

    sealed = chain.seal
    monkeypatch.setattr(chain, "seal", sealing)
    with running(tmp_path, linger_s=0.1) as trail:
        for number in range(10):
            ask(trail, output="poison" if number == 5 else str(number))
        assert trail.flush()
        assert trail.stats.lost == 1
    assert outputs(tmp_path) == ["0", "1", "2", "3", "4", "6", "7", "8", "9"]
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert "1 records lost" in report.notes[0]
