"""Records written by a process of its own: the same records, and one per request whichever process dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.audit.trails import CHAT, USAGE, ask, make_chain, records, running, wait_for
from tonle.audit import Alarm, Answer, AuditOptions, AuditTrail, Collector
from tonle.audit.disk import TEMP_PREFIX, locked
from tonle.audit.intents import Intents
from tonle.audit.recover import recover
from tonle.audit.redaction import Redactor
from tonle.audit.verify import verify
from tonle.audit.writer import ChainWriter
from tonle.audit.writer_client import WriterClient
from tonle.audit.writer_process import RecordBatch, _write, lives

STREAM = b"""data: {"id":"c-1","choices":[{"index":0,"delta":{"content":"Hello"}}]}

data: {"id":"c-1","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}}],"usage":{"total_tokens":3}}

data: [DONE]

"""


@contextlib.contextmanager
def apart(directory: Path, *, on_alarm: Any = None, **options: Any) -> Iterator[AuditTrail]:
    with_defaults = {"linger_s": 0.0, "fsync": "never", "min_free_bytes": 0} | options
    trail = AuditTrail(AuditOptions(directory=directory, **with_defaults), own_process=True, on_alarm=on_alarm)
    trail.start()
    try:
        yield trail
    finally:
        trail.close(timeout_s=60)


def writer_process() -> psutil.Process:
    [child] = [child for child in psutil.Process().children() if "tonle.audit.writer_process" in child.cmdline()]
    return child


def test_the_records_are_the_same(tmp_path: Path) -> None:
    def fill(trail: AuditTrail) -> None:
        ask(trail)
        record = trail.open(CHAT, request_id="r", client="10.0.0.7", body=b'{"stream":true}')
        record.note(key_id="k", route={"backend": "b"}, warnings=["x"])
        collector = Collector("text/event-stream")
        collector.feed(STREAM)
        record.close("ok", http_status=200, answer=collector.finish())

    with running(tmp_path / "thread") as thread, apart(tmp_path / "process") as process:
        fill(thread)
        fill(process)
    changing = ("id", "chain_id", "request_id", "date", "time", "finished", "latency_ms", "chain")
    plain = [
        [{name: value for name, value in record.items() if name not in changing} for record in records(tmp_path / room)]
        for room in ("thread", "process")
    ]
    assert plain[0] == plain[1]
    assert plain[0][1]["choices"][0]["tool_calls"]
    assert verify(tmp_path / "process").ok
    assert not [child for child in psutil.Process().children() if "tonle.audit.writer_process" in child.cmdline()]
    assert not list((tmp_path / "process" / "open").iterdir())


def test_odd_facts_are_on_record_too(tmp_path: Path) -> None:
    answers = [
        Answer(usage={"prompt_tokens_details": 3}),
        Answer(response_id=5),  # type: ignore[arg-type]
        Answer(raw=1 << 70),
        Answer(raw="half \ud800"),
        Answer(raw=object()),
    ]
    with apart(tmp_path) as trail:
        for answer in answers:
            trail.open(CHAT, body=b"{}").close("ok", answer=answer, http_status=200)
        for body in (None, b"", b"\xff\xfe", {"prompt": {1, 2}}, {"messages": [{"role": "user", "content": "\ud800"}]}):
            trail.open(CHAT, body=body).close("refused", http_status=400)
        record = trail.open(CHAT)
        record.timings_ms["queue"] = "long"  # type: ignore[assignment]
        record.close("ok", http_status=200)
        ask(trail)
    assert len(records(tmp_path)) == 12
    assert records(tmp_path)[-1]["usage"]["total_tokens"] == USAGE["total_tokens"]
    assert verify(tmp_path).ok


def test_rules_that_keep_words_off_the_disk_hold(tmp_path: Path) -> None:
    with apart(tmp_path, redact=("email",), omit=("client",)) as trail:
        ask(trail)
        assert b"dara@example.org" not in b"".join(path.read_bytes() for path in (tmp_path / "open").iterdir())
    [record] = records(tmp_path)
    assert record["user_input"] == "សួស្តី, I am at [email]"
    assert record["client"] == "[redacted]"


def test_a_batch_too_large_for_one_message_is_sent_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.audit.writer_client.MAX_MESSAGE_BYTES", 3000)
    with apart(tmp_path) as trail:
        with locked(tmp_path):  # they gather meanwhile
            asked = [ask(trail, output="x" * 1000).request_id for _ in range(20)]
        assert trail.flush(60)
    assert [record["request_id"] for record in records(tmp_path)] == asked
    assert verify(tmp_path).ok


def test_a_batch_whose_second_part_failed_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tonle.audit.trail.RETRY_S", 0.02)
    monkeypatch.setattr("tonle.audit.writer_client.MAX_MESSAGE_BYTES", 3000)
    exchange, num_exchanges = WriterClient._exchange, 0

    def dying(client: WriterClient, message: bytes) -> None:
        nonlocal num_exchanges
        num_exchanges += 1
        if num_exchanges == 3:
            writer_process().kill()
        exchange(client, message)

    monkeypatch.setattr(WriterClient, "_exchange", dying)
    with apart(tmp_path) as trail:
        with locked(tmp_path):
            asked = [ask(trail, output="x" * 1000).request_id for _ in range(20)]
        assert trail.flush(60)
    assert [record["request_id"] for record in records(tmp_path)] == asked
    assert "died (signal SIGKILL)" in caplog.text
    assert trail.stats.written == 20 and verify(tmp_path).ok


def test_a_record_too_large_for_a_message_is_kept_without_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonle.audit.writer_client.MAX_RECORD_BYTES", 3000)
    with apart(tmp_path) as trail:
        large, small = ask(trail, output="x" * 4000).request_id, ask(trail).request_id
    found = {record["request_id"]: record for record in records(tmp_path)}
    assert set(found) == {large, small}
    assert found[large]["output"] is None and found[small]["output"]
    assert verify(tmp_path).ok


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_everybody_is_for_the_server(tmp_path: Path, number: signal.Signals) -> None:
    with apart(tmp_path) as trail:
        ask(trail)
        assert trail.flush(60)
        child = writer_process()
        child.send_signal(number)
        ask(trail)
        assert trail.flush(60)
        assert writer_process() == child
    assert len(records(tmp_path)) == 2


def test_a_killed_writer_is_replaced_and_nothing_is_missing_or_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonle.audit.trail.RETRY_S", 0.02)
    chance, alarms, asked = random.Random(3), list[Alarm](), list[str]()
    with apart(tmp_path, on_alarm=alarms.append) as trail:
        for _ in range(4):
            asked += [ask(trail, output="x" * 2000).request_id for _ in range(chance.randrange(20, 200))]
            time.sleep(chance.random() / 100)
            writer_process().kill()
            asked += [ask(trail).request_id for _ in range(20)]
            assert trail.flush(60)
    assert sorted(record["request_id"] for record in records(tmp_path)) == sorted(asked)
    assert trail.stats.written == len(asked)
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert not alarms, "records wait for the next writer, and no request is refused"
    assert not list(tmp_path.rglob(f"{TEMP_PREFIX}*"))


SERVER = """
import sys, time
from pathlib import Path
from tonle.audit import AuditOptions, AuditTrail
options = AuditOptions(directory=Path(sys.argv[1]), fsync="never", linger_s=0.0, min_free_bytes=0)
trail = AuditTrail(options, own_process=True)
trail.start()
number = 0
while True:
    record = trail.open("/v1/chat/completions", request_id=f"{sys.argv[2]}-{number}", body=b'{"messages": []}')
    print(record.request_id, flush=True)
    if number % 5 != 4:  # some stay open
        record.close("ok", http_status=200, output="x" * 2000)
    number += 1
    time.sleep(0.0005)
"""


def test_a_killed_server_leaves_one_record_per_request(tmp_path: Path) -> None:
    """The next one starts at once, while the writer of the dead one may still hold a batch."""
    chance, opened = random.Random(7), list[str]()
    for number in range(4):
        command = [sys.executable, "-c", SERVER, str(tmp_path), f"r{number}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            opened += [process.stdout.readline().strip() for _ in range(chance.randrange(1, 60))]
            # Half of the time the writer is kept waiting, with a batch in its hands, until after the kill.
            with locked(tmp_path) if number % 2 else contextlib.nullcontext():
                time.sleep(chance.random() / 50)
                process.send_signal(signal.SIGKILL)
                opened += process.stdout.read().split()
                process.wait()
        with running(tmp_path) as trail:
            ask(trail)
    written = [record["request_id"] for record in records(tmp_path)]
    assert len(written) == len(set(written)), "never two"
    assert set(opened) <= set(written)
    assert len(written) - len(opened) <= 4 + 4, "ours, and a last one that was opened and not printed"
    report = verify(tmp_path)
    assert report.ok, report.findings


def test_a_server_that_died_gets_no_more_records(tmp_path: Path) -> None:
    """What recovery has called interrupted must not come a second time."""
    owner = tmp_path / "page"
    owner.write_bytes(b"")
    assert not lives(str(owner))
    assert not lives(str(tmp_path / "never"))
    with running(tmp_path / "audit"):
        [page] = (tmp_path / "audit" / "open").iterdir()
        assert lives(str(page))
    assert not lives(str(page))


def test_a_disk_that_refuses_is_reported_by_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.audit.trail.RETRY_S", 0.05)
    with apart(tmp_path) as trail:
        ask(trail)
        assert trail.flush(60)
        [path] = tmp_path.glob("*/chain.jsonl")
        path.rename(tmp_path / "kept")
        path.mkdir()  # nothing can be written here
        ask(trail)
        wait_for(lambda: trail.stats.failing)
        assert "chain.jsonl cannot be written: it is a folder" in str(trail.stats.failing)
        path.rmdir()
        (tmp_path / "kept").rename(path)
        assert trail.flush(60)
        wait_for(lambda: trail.stats.failing is None)
    assert len(records(tmp_path)) == 2
    assert verify(tmp_path).ok


def test_a_server_whose_page_was_removed_alarms_and_keeps_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonle.audit.trail.RETRY_S", 0.02)
    alarms = list[Alarm]()
    with apart(tmp_path, on_alarm=alarms.append) as trail:
        still_open = trail.open(CHAT, body=b"{}")
        ask(trail)
        assert trail.flush(60)
        for path in (tmp_path / "open").iterdir():
            path.unlink()
        (tmp_path / "open").rmdir()
        asked = [ask(trail).request_id for _ in range(5)]
        assert trail.flush(60)
        wait_for(lambda: trail.stats.failing is None and len(alarms) >= 2)
        [page] = (tmp_path / "open").iterdir()
        assert still_open.request_id.encode() in page.read_bytes()  # a crash would still find it
    written = [record["request_id"] for record in records(tmp_path)]
    assert len(written) == len(set(written)) == 7
    assert set(asked) <= set(written)
    assert {alarm.kind for alarm in alarms} == {"failing", "recovered"}
    assert verify(tmp_path).ok


def test_a_batch_of_a_server_without_a_page_is_refused(tmp_path: Path) -> None:
    chain = make_chain(tmp_path)
    receipt = _write(
        ChainWriter(chain, Redactor(()), ()), RecordBatch(str(tmp_path / "open" / "gone.log"), False, None, [])
    )
    assert receipt.errno == errno.ESTALE
    assert not receipt.unsafe


def test_a_page_has_no_name_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process recovers just between the two."""
    chain = make_chain(tmp_path)
    flock, num_recovered = fcntl.flock, 0

    def late(file: Any, operation: int) -> None:
        nonlocal num_recovered
        if operation == fcntl.LOCK_EX and not num_recovered and list((tmp_path / "open").iterdir()):
            num_recovered += 1
            recover(chain)
        flock(file, operation)

    monkeypatch.setattr("tonle.audit.intents.fcntl.flock", late)
    intents = Intents(tmp_path, chain.key)
    assert num_recovered == 1
    assert lives(intents.owner)
    assert [path.name for path in (tmp_path / "open").iterdir()] == [Path(intents.owner).name]
    intents.close()
