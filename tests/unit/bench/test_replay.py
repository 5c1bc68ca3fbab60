"""Replay of an audit trail: recorded times, what is sent and what is not, answers that changed."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.fakes.front import FakeFront
from tests.http.serving import serving
from tests.unit.audit.trails import CHAT, USAGE, records, running, wait_for
from tonle.audit import AuditTrail
from tonle.bench import BenchOptions, BenchReport, run_bench
from tonle.bench.datasets import audit_trail, replay_workload
from tonle.bench.datasets.audit_trail import recorded_requests, rows_of
from tonle.bench.datasets.replay_workload import ReplayWorkload
from tonle.bench.measure import Sample
from tonle.cli.app import app
from tonle.errors import ConfigError, InvalidRequest, NotFound

BEGIN = datetime(2026, 3, 1, 9, 30, 0, tzinfo=UTC)
SAME = "the same answer"


def question(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def ask_at(
    trail: AuditTrail, offset_s: float, body: Any, *, output: str | None = SAME, path: str = CHAT, **close: Any
) -> str:
    """A request that arrived so long after `BEGIN`; its id."""
    record = trail.open(path, body=json.dumps(body).encode())
    record.opened_ns = int((BEGIN.timestamp() + offset_s) * 1e6) * 1000
    record.key_id = "key-1"
    record.close(**({"status": "ok", "http_status": 200, "output": output, "usage": USAGE} | close))
    return record.id


def replayed(trail: Path, answer: str = SAME, **options: Any) -> BenchReport:
    with serving(FakeFront(lambda prompt, index: f"{answer}{'!' if 'odd' in prompt else ''}")) as url:
        return run_bench(BenchOptions(url=url, replay=trail, **({"speed": 50.0} | options)))


def planned(trail: Path, **options: Any) -> list[tuple[float | None, str]]:
    """When each request is due, and the question."""
    jobs = ReplayWorkload(BenchOptions(replay=trail, **options)).jobs(0, "run")
    return [(job.due_s, json.loads(job.body)["messages"][-1]["content"]) for job in jobs]


@pytest.mark.parametrize("speed", [1.0, 10.0])
def test_requests_are_due_at_their_recorded_times(tmp_path: Path, speed: float) -> None:
    """Written in another order than they arrived in, by a server that answers some faster than others."""
    offsets = [0.0, 0.0123, 0.5, 0.500001, 61.25, 3600.0]
    with running(tmp_path) as trail:
        for offset in reversed(offsets):
            ask_at(trail, offset, question(f"at {offset}"))
    due = planned(tmp_path, speed=speed)
    assert [text for _, text in due] == [f"at {offset}" for offset in offsets]
    assert [moment for moment, _ in due] == pytest.approx([offset / speed for offset in offsets], abs=1e-5)


def test_a_period_of_the_trail(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        for offset in (0, 60, 120):
            ask_at(trail, offset, question(f"at {offset}"))
    assert planned(tmp_path, since="2026-03-01T09:31", until="2026-03-01T09:32") == [(0.0, "at 60")]
    with pytest.raises(ConfigError, match="no records from 2027-01-01"):
        ReplayWorkload(BenchOptions(replay=tmp_path, since="2027-01-01"))
    with pytest.raises(InvalidRequest, match="not a time"):
        ReplayWorkload(BenchOptions(replay=tmp_path, since="yesterday"))
    with pytest.raises(NotFound, match="no audit trail"):
        ReplayWorkload(BenchOptions(replay=tmp_path / "none"))


def test_records_are_read_a_page_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, also where more than a page of them arrived at one moment."""
    monkeypatch.setattr(audit_trail, "PAGE_ROWS", 3)
    offsets = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 3.0]
    with running(tmp_path) as trail:
        ids = [ask_at(trail, offset, question("q")) for offset in offsets]
    assert sorted(row.id or "" for row in rows_of(tmp_path)) == sorted(ids)


def test_few_requests_are_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    really = replay_workload.read_row
    monkeypatch.setattr(replay_workload, "read_row", lambda *args: (read.append(args[1].id), really(*args))[1])
    monkeypatch.setattr(replay_workload, "AHEAD_JOBS", 4)
    with running(tmp_path) as trail:
        for offset in range(20):
            ask_at(trail, offset, question("q"))
    workload = ReplayWorkload(BenchOptions(replay=tmp_path))
    jobs = workload.jobs(0, "run")
    assert len(read) == 4
    job = next(jobs)
    assert len(read) <= 8
    assert "0 of 20 recorded requests were sent" in workload.notes()[0], "it was taken, and not sent yet"
    job.answered(Sample(index=0, start_s=0.0, end_s=1.0, failure="timeout"), None)
    assert "1 of 20 recorded requests were sent" in workload.notes()[0]
    assert len(list(jobs)) == 19
    assert len(read) == 20


def test_a_changed_answer_is_named(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        ask_at(trail, 0.0, question("first"))
        changed = ask_at(trail, 0.5, question("an odd one", stream=True))
        sampled = ask_at(trail, 1.0, question("by chance", temperature=0.7), output="another")
        ask_at(trail, 1.5, question("with a seed", temperature=0.7, seed=3))
        ask_at(trail, 1.6, question("the caller left"), status="cancelled", output="the sa")
        ask_at(trail, 2.0, question("too many"), status="refused", http_status=429, output=None)
        ask_at(trail, 2.1, {"content": "count me"}, path="/tokenize")
    report = replayed(tmp_path, keep_requests=True)
    level = report.levels[0]
    assert (report.ok, report.prompt_kind, level.label) == (True, "replay", "replay ×50")
    assert (level.requests, level.failed, level.concurrency, level.rate) == (5, 0, None, None)
    assert [(each.record, each.how) for each in level.changed] == [
        (changed, "at character 15: 'the same answer' is now 'the same answer!'")
    ]
    assert level.rows is not None
    assert {row.record: row.changed is not None for row in level.rows}[sampled] is False
    assert level.max_send_delay_ms is not None
    notes = "\n".join(report.notes)
    assert (
        "5 of 7 recorded requests were sent, 50 times as fast as they came; they had arrived within 1.6 s from" in notes
    )
    assert "1 not sent: refused when it was recorded" in notes
    assert "1 not sent: /tokenize is not replayed" in notes
    assert "1 sent but not compared: sampled without a seed" in notes
    assert "1 sent but not compared: cancelled when it was recorded" in notes
    assert "3 answers were compared with the recorded ones: 1 changed" in notes
    assert f"changed: {changed} at character 15" in notes
    assert "of their recorded times" in notes


def test_unchanged_answers_of_every_api(tmp_path: Path) -> None:
    """Recorded by a server, whole and streamed, in each of its APIs; tool calls and several choices have tests of their own."""
    said = [{"role": "user", "content": "one"}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, question("one", n=2)),
        (CHAT, question("one", stream=True)),
        ("/v1/completions", {"prompt": "one", "temperature": 0, "max_tokens": 40}),
        ("/v1/messages", {"model": "scripted", "max_tokens": 40, "temperature": 0, "messages": said}),
        ("/v1/responses", {"model": "scripted", "input": "one", "temperature": 0}),
        ("/api/chat", {"options": {"temperature": 0}, "messages": said}),
        ("/api/generate", {"options": {"temperature": 0}, "prompt": "one"}),
        ("/api/v1/inference", {"user_input": "one"}),
        ("/v1/embeddings", {"input": "one"}),
    ]
    with serving(FakeFront(), audit_dir=str(tmp_path / "audit")) as url:
        for path, body in bodies:
            assert httpx.post(url + path, json=body).status_code == 200, path
    with serving(FakeFront()) as url:
        report = run_bench(BenchOptions(url=url, replay=tmp_path / "audit", speed=100.0))
    level = report.levels[0]
    assert (level.requests, level.failures) == (len(bodies), [])
    assert level.changed == []
    assert any("8 answers were compared with the recorded ones: all are the same" in note for note in report.notes)
    assert any("1 sent but not compared: answers of /v1/embeddings are not compared" in note for note in report.notes)
    assert level.output_tokens > 0


def test_streams_of_other_apis_are_timed(tmp_path: Path) -> None:
    """Records of a gateway become chat requests; those of another server are sent to the path they came from."""
    said = [{"role": "user", "content": "one"}]
    with running(tmp_path) as trail:
        ask_at(
            trail, 0.0, {"model": "scripted", "max_tokens": 40, "temperature": 0, "messages": said}, path="/v1/messages"
        )
        ask_at(trail, 0.1, {"model": "scripted", "input": "one", "temperature": 0}, path="/v1/responses")
    report = replayed(tmp_path, keep_requests=True)
    level = report.levels[0]
    assert (level.succeeded, level.failures, level.changed) == (2, [], [])
    assert level.counted_by == ["usage"]
    assert level.rows is not None
    for row in level.rows:
        assert row.ttft_ms is not None and row.e2el_ms is not None and row.tpot_ms is not None
        assert 0 < row.ttft_ms <= row.e2el_ms
        assert row.itl_ms, "each piece of the text is an arrival"
        assert row.prompt_tokens and row.output_tokens == len(SAME) + 1


def test_a_tool_call_that_was_not_there_is_a_change(tmp_path: Path) -> None:
    from tonle.audit.replay_records import Recorded
    from tonle.protocol.answers import Answer

    answer = Answer()
    answer.add_text(0, "fine", 0.0)
    recorded = Recorded("id", CHAT, "fine")
    assert recorded.compare(answer).verdict == "same"
    answer.add_call(0, 0, "call-1", "look", 0.0)
    answer.finish()
    assert recorded.compare(answer).verdict == "different"


def test_masked_requests_are_counted(tmp_path: Path) -> None:
    with running(tmp_path, redact=("email",)) as trail:
        ask_at(trail, 0.0, question("write to dara@example.org"))
        ask_at(trail, 0.1, question("hello"))
    report = replayed(tmp_path)
    assert report.levels[0].requests == 1
    assert any(note.startswith("1 not sent: its request is not on record as it was") for note in report.notes)


def test_another_model_is_asked_for(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        ask_at(trail, 0.0, question("hello"))
    failed = replayed(tmp_path, model="missing").levels[0]
    assert [group.example.split(":")[0] for group in failed.failures] == ["HTTP 404"]


def test_what_a_replay_leaves_in_the_same_trail_is_not_replayed_in_turn(tmp_path: Path) -> None:
    directory = tmp_path / "audit"
    with serving(FakeFront(), audit_dir=str(directory)) as url:
        for text in ("one", "two"):
            httpx.post(url + CHAT, json=question(text))
        wait_for(lambda: directory.exists() and len(records(directory)) == 2)
        workload = ReplayWorkload(BenchOptions(replay=directory))
        httpx.post(url + CHAT, json=question("three"))
        wait_for(lambda: len(records(directory)) == 3)
    assert len(list(workload.jobs(0, "run"))) == 2
    assert len(list(ReplayWorkload(BenchOptions(replay=directory)).jobs(0, "run"))) == 3


def test_requests_for_a_simulation(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        ask_at(trail, 2.0, question("second", messages=[{"role": "user", "content": "hi"}]))
        ask_at(trail, 0.5, question("first"))
        ask_at(trail, 3.0, question("refused"), status="refused", usage=None)
        ask_at(trail, 3.5, {"prompt": [5, 6], "model": "scripted"}, path="/v1/completions")
    found = list(recorded_requests(tmp_path))
    assert [request.arrival_s for request in found] == pytest.approx([0.0, 1.5, 3.0], abs=1e-5)
    assert {(each.prompt_tokens, each.output_tokens, each.owner) for each in found} == {(11, 5, "key-1")}
    assert [request.text for request in found] == ["scripted\nuser: first", "scripted\nuser: hi", "scripted\n[5,6]"]


def test_the_command(tmp_path: Path) -> None:
    runner = CliRunner()
    with running(tmp_path / "audit") as trail:
        for offset in range(3):
            ask_at(trail, offset, question("an odd one" if offset else "first"))
    with serving(FakeFront(lambda prompt, index: SAME + ("!" if "odd" in prompt else ""))) as url:
        done = runner.invoke(
            app,
            ["bench", "--url", url, "--replay", str(tmp_path / "audit"), "--speed", "100", "--as-model", "scripted",
             "--json", str(tmp_path / "report.json")],
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "replay ×100" in done.stdout
    assert "3 of 3 recorded requests were sent" in done.stdout
    assert "2 changed" in done.stdout
    saved = json.loads((tmp_path / "report.json").read_text())
    assert len(saved["levels"][0]["changed"]) == 2
    for arguments, why in (
        (["--replay", str(tmp_path)], "no audit trail"),
        (["--replay", str(tmp_path / "audit"), "--concurrency", "4"], "--concurrency cannot be set"),
        (["--replay", str(tmp_path / "audit"), "--preset", "chat"], "a preset is for synthetic prompts"),
        (["--preset", "nonsense"], "presets: chat"),
        (["--think-time", "soon"], "0.5-5"),
    ):
        done = runner.invoke(app, ["bench", "--url", "http://127.0.0.1:9", *arguments])
        assert done.exit_code == 2, done.output
        assert why in done.stderr


def test_presets_are_listed_and_overridden() -> None:
    from tonle.cli.bench_data import data_settings

    done = CliRunner().invoke(app, ["bench", "--preset", "list"])
    assert done.exit_code == 0
    assert "chat" in done.stdout and "32-400 tokens in, 128-512 out" in done.stdout
    settings = data_settings({"preset": "chat", "output_tokens": "7"})
    assert (str(settings["input_tokens"]), str(settings["output_tokens"])) == ("32-400", "7")
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(names) == len(set(itertools.chain(names)))
