"""One record per request, whatever happens to it; and what the trail does when the disk refuses."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.audit.trails import BODY, CHAT, ask, records, running, wait_for
from tonle.audit import Alarm, Answer, AuditOptions, AuditTrail
from tonle.audit.disk import Disk
from tonle.audit.verify import verify
from tonle.errors import CapacityError, ConfigError, InternalError


def test_a_record_has_every_fact(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        record = trail.open(CHAT, request_id="req-1", client="10.0.0.7", body=json.dumps(BODY).encode())
        record.note(adapter_digest="c" * 64)
        record.note(key_id="key-1", adapter="khmer-qa", model_config={"max_model_len": 512}, route={"backend": "b1"})
        record.note(cache={"state": "miss"}, experiment={"name": "ab", "arm": "a"})
        record.timings_ms.update(queue=1.5, prefill=2.25, decode=3.0, ttft=4.0)
        record.close("ok", http_status=200, output="សួស្តី", usage={"prompt_tokens": 3, "completion_tokens": 2},
                     response_id="chatcmpl-1", finish_reason="stop")  # fmt: skip
    [path] = tmp_path.glob("*/chat_completions_*.json")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", path.parent.name)
    assert re.fullmatch(rf"chat_completions_{record.id}_\d{{8}}T\d{{12}}Z\.json", path.name)
    text = path.read_text(encoding="utf-8")
    assert '\n  "user_input": "សួស្តី, I am at dara@example.org",\n' in text, "indented, and people can read it"
    written = json.loads(text)
    assert written["time"].startswith(written["date"])
    expected = {
        "schema": "tonle.audit/1", "request_id": "req-1", "response_id": "chatcmpl-1", "endpoint": CHAT,
        "client": "10.0.0.7", "key_id": "key-1", "status": "ok", "http_status": 200, "error": None, "model": "river",
        "model_config": {"max_model_len": 512}, "adapter": "khmer-qa", "adapter_digest": "c" * 64, "stream": False,
        "system_prompt": "Be kind.",
        "messages": BODY["messages"], "output": "សួស្តី", "finish_reason": "stop", "parameters": {"tools": []},
        "sampling": {"temperature": 0, "seed": 7, "max_tokens": 16}, "cache": {"state": "miss"},
        "route": {"backend": "b1"}, "experiment": {"name": "ab", "arm": "a"},
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": None},
    }  # fmt: skip
    assert {name: written[name] for name in expected} == expected
    latency = written["latency_ms"]
    assert latency.pop("total") > 0
    assert latency == {"queue": 1.5, "prefill": 2.25, "decode": 3.0, "ttft": 4.0}


@pytest.mark.parametrize(
    ("endpoint", "prefix"),
    [("/v1/completions", "completions_"), ("/api/v1/inference", "api_v1_inference_"), ("/../../etc/x\n", "etc_x_")],
)
def test_the_file_is_named_after_the_endpoint(tmp_path: Path, endpoint: str, prefix: str) -> None:
    with running(tmp_path) as trail:
        trail.open(endpoint).close("refused", http_status=404)
    [path] = tmp_path.glob("*/*Z.json")
    assert path.name.lstrip("_.").startswith(prefix)
    assert path.parent.parent == tmp_path


@pytest.mark.parametrize("status", ["ok", "cached", "refused", "failed", "cancelled"])
def test_each_end_leaves_one_record(tmp_path: Path, status: str) -> None:
    with running(tmp_path) as trail:
        ask(trail, status=status, http_status=None, error={"message": "why"} if status == "failed" else None)
    [record] = records(tmp_path)
    assert record["status"] == status
    assert verify(tmp_path).ok


@pytest.mark.parametrize("body", [None, b"", b"not json", b"[1]", b"\xff\xfe", b'{"messages": 3, "prompt": {}}',
                                  b'{"messages": [1, {"role": "user"}]}', b"[" * 5000,
                                  b'{"messages":[{"role":"user","content":[{"type":"text","text":"hi"},{"type":"image_url"}]}]}',
                                  {"messages": [{"role": "user", "content": "half \ud800"}]}, {"prompt": {1, 2}}])  # fmt: skip
def test_a_request_that_makes_no_sense_is_on_record_too(tmp_path: Path, body: Any) -> None:
    with running(tmp_path) as trail:
        trail.open(CHAT, body=body).close("refused", http_status=400)
    assert len(records(tmp_path)) == 1
    assert verify(tmp_path).ok


def test_a_record_closes_once(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        record = ask(trail)
        with pytest.raises(InternalError, match="closed twice"):
            record.close("failed")
    assert len(records(tmp_path)) == 1


def test_what_is_open_when_the_server_stops_is_interrupted(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        ask(trail)
        trail.open(CHAT, request_id="late", body=json.dumps(BODY).encode())
    assert [record["status"] for record in records(tmp_path)] == ["ok", "interrupted"]
    assert not list((tmp_path / "open").iterdir())


def test_several_processes_share_a_directory(tmp_path: Path) -> None:
    with running(tmp_path) as one, running(tmp_path) as two:
        for _ in range(10):
            ask(one)
            ask(two)
            assert one.flush()
            assert two.flush()
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert report.num_records == 20


def test_threads_may_close_records(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        workers = [threading.Thread(target=lambda: [ask(trail) for _ in range(50)]) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert verify(tmp_path).num_records == 200


def test_write_time_redaction(tmp_path: Path) -> None:
    with running(tmp_path, redact=("email", "team=Dara"), omit=("client",)) as trail:
        ask(trail)
        assert b"dara@example.org" not in b"".join(path.read_bytes() for path in (tmp_path / "open").iterdir())
    [record] = records(tmp_path)
    assert record["user_input"] == "សួស្តី, I am at [email]"
    assert record["messages"][1]["content"] == "សួស្តី, I am at [email]"
    assert record["output"] == "Hello, [team]."
    assert record["client"] == "[redacted]"
    assert record["masked"] == {"email": 2, "team": 1, "omitted client": 1}
    assert verify(tmp_path).ok


def test_redaction_of_single_fields(tmp_path: Path) -> None:
    with running(tmp_path, redact=("output:email", "plate=[A-Z]{2,3}-[0-9]{4}")) as trail:
        record = trail.open("/v1/completions", body=b'{"prompt": "a@b.org drives AB-1234"}')
        record.close("ok", http_status=200, output="a@b.org in AB-1234")
    [record] = records(tmp_path)
    assert record["prompt"] == "a@b.org drives [plate]"
    assert record["output"] == "[email] in [plate]"
    assert record["masked"] == {"email": 1, "plate": 3}  # twice in the prompt: it is also the user's last word


@pytest.mark.parametrize("wrong", [{"redact": ("nonsense",)}, {"redact": ("nofield:email",)},
                                   {"redact": ("x=(",)}, {"omit": ("model",)}, {"fsync": "often"},
                                   {"max_queue": 0}, {"retention_days": 0}, {"linger_s": -1.0}])  # fmt: skip
def test_wrong_options_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AuditTrail(AuditOptions(directory=tmp_path, **wrong))


def test_a_directory_that_cannot_be_used_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InternalError, match="cannot be used"):
        AuditTrail(AuditOptions(directory=tmp_path / "file" / "audit")).start()


# -- a disk that refuses


class FullDisk(Disk):
    """Full whenever the test says so."""

    def __init__(self) -> None:
        self.is_full = False
        self.fails: Callable[[], bool] = lambda: self.is_full

    def _refuse(self) -> None:
        if self.fails():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_new(self, path: str, content: bytes, *, durable: bool) -> None:
        if self.fails():
            super().write_new(
                path, content[: len(content) // 2], durable=durable
            )  # as a real disk: half of it is there
        self._refuse()
        super().write_new(path, content, durable=durable)

    def append(self, path: Path, content: bytes, *, durable: bool = False) -> None:
        self._refuse()
        super().append(path, content, durable=durable)

    def overwrite(self, path: Path, content: bytes, *, durable: bool = False) -> None:
        self._refuse()
        super().overwrite(path, content, durable=durable)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.audit.trail.RETRY_S", 0.02)
    monkeypatch.setattr("tonle.audit.trail.CHECK_S", 0.02)


def test_a_full_disk_refuses_requests_and_loses_nothing(tmp_path: Path) -> None:
    disk, alarms = FullDisk(), list[Alarm]()
    with running(tmp_path, disk=disk, on_alarm=alarms.append) as trail:
        ask(trail)
        assert trail.flush()
        disk.is_full = True
        trail.admit()
        ask(trail, output="during")  # was admitted before the disk was known to be full
        wait_for(lambda: trail.stats.failing)
        with pytest.raises(CapacityError, match="No space left") as refused:
            trail.admit()
        assert refused.value.retry_after_s > 0
        disk.is_full = False
        wait_for(lambda: trail.stats.failing is None)
        trail.admit()
        ask(trail, output="after")
    assert [record["output"] for record in records(tmp_path)] == ["Hello, Dara.", "during", "after"]
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert any("1 requests refused" in note for note in report.notes)
    assert [alarm.kind for alarm in alarms] == ["failing", "recovered"]


def test_a_full_disk_serves_and_sounds_the_alarm(tmp_path: Path) -> None:
    disk, alarms = FullDisk(), list[Alarm]()
    with running(tmp_path, disk=disk, on_alarm=alarms.append, on_full="serve", max_queue=3) as trail:
        disk.is_full = True
        ask(trail)
        wait_for(
            lambda: trail.stats.failing and trail.num_queued == 0
        )  # the writer has taken it and cannot put it down
        for number in range(10):
            trail.admit()
            ask(trail, output=f"answer {number}")
        wait_for(lambda: sum(alarm.num_lost for alarm in alarms) == 7)
        disk.is_full = False
        wait_for(lambda: trail.stats.failing is None)
    assert trail.stats.written == 4
    assert trail.stats.lost == 7
    report = verify(tmp_path)
    assert report.ok, report.findings
    assert report.num_records == 4
    assert any("7 records lost" in note for note in report.notes)
    assert alarms[0].kind == "failing"


@pytest.mark.parametrize("call", range(1, 8))
def test_a_disk_may_fail_at_any_write(tmp_path: Path, call: int) -> None:
    disk, num_calls = FullDisk(), 0

    def fails() -> bool:
        nonlocal num_calls
        num_calls += 1
        return call <= num_calls <= call + 2

    with running(tmp_path, disk=disk) as trail:
        disk.fails = fails
        for number in range(3):
            ask(trail, output=str(number))
            assert trail.flush()
    assert [record["output"] for record in records(tmp_path)] == ["0", "1", "2"]
    report = verify(tmp_path)
    assert report.ok, report.findings


def test_too_little_space_counts_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, min_free_bytes=1) as trail:
        monkeypatch.setattr(Disk, "free_bytes", lambda self, path: 0)
        wait_for(lambda: trail.stats.failing)
        with pytest.raises(CapacityError, match="bytes are free"):
            trail.admit()
        monkeypatch.setattr(Disk, "free_bytes", lambda self, path: 10)
        wait_for(lambda: trail.stats.failing is None)
        trail.admit()


def test_a_queue_that_is_full_refuses(tmp_path: Path) -> None:
    trail = AuditTrail(AuditOptions(directory=tmp_path, max_queue=2))  # not started: nothing empties it
    ask(trail)
    trail.admit()
    ask(trail)
    with pytest.raises(CapacityError, match="2 records are waiting"):
        trail.admit()


def test_refusals_without_end_do_not_fill_the_memory(tmp_path: Path) -> None:
    trail = AuditTrail(AuditOptions(directory=tmp_path, max_queue=2))  # not started: nothing empties it
    for _ in range(10):
        ask(trail, status="refused", http_status=503)
    assert (trail.num_queued, trail.stats.lost) == (4, 6)
    ask(trail)
    assert trail.num_queued == 5, "who was served is on record"


def test_facts_of_an_odd_kind_do_not_stop_the_writer(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        trail.open(CHAT).close("ok", answer=Answer(usage={"prompt_tokens_details": 3}), http_status=200)
        record = trail.open(CHAT)
        record.timings_ms["queue"] = "long"  # type: ignore[assignment]
        record.close("ok", http_status=200)
        ask(trail)
    assert len(records(tmp_path)) == 3
    assert verify(tmp_path).ok


def test_a_flush_that_fails_is_told(tmp_path: Path) -> None:
    class Unflushable(Disk):
        fails = True

        def sync_all(self, path: Path) -> None:
            if self.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk, alarms = Unflushable(), list[Alarm]()
    with running(tmp_path, disk=disk, on_alarm=alarms.append, fsync="interval", fsync_interval_s=0.001) as trail:
        ask(trail)
        for _ in range(24_000):
            if trail.stats.failing:
                break
            ask(trail)
            assert trail.flush(60)
            time.sleep(0.005)
        assert "Input/output error" in str(trail.stats.failing)
        disk.fails = False
        wait_for(lambda: trail.stats.failing is None)
    assert verify(tmp_path).num_records == trail.stats.written
    assert alarms[0].kind == "failing"


def test_every_policy_of_flushing_writes(tmp_path: Path) -> None:
    for fsync in ("never", "interval", "always"):
        with running(tmp_path / fsync, fsync=fsync, fsync_interval_s=0.001) as trail:
            ask(trail)
            assert trail.flush()
            ask(trail)
        assert verify(tmp_path / fsync).num_records == 2


def test_a_loss_during_the_note_of_another_is_named_too(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        assert trail._writer is not None
        write, told = trail._writer.write, list[list[str]]()

        def losing(batch: Any, lost: dict[str, Any] | None, *, again: bool = False) -> None:
            write(batch, lost, again=again)
            if lost is not None:
                told.append(lost["request_ids"])
                if len(told) == 1:
                    trail._lose([trail.open(CHAT, request_id="second")], "for the test")

        trail._writer.write = losing  # type: ignore[method-assign]
        trail._lose([trail.open(CHAT, request_id="first")], "for the test")
        wait_for(lambda: len(told) == 2)
    assert told == [["first"], ["second"]]
