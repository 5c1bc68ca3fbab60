"""`tonle audit`: every sub-command, as people type it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from tests.fakes.front import FakeFront
from tests.http.serving import serving
from tests.unit.audit.trails import BODY, CHAT, ask, files, records, running, write_days
from tests.unit.bench.scripted import Behaviour, Cut, Step, json_reply
from tests.unit.bench.scripted import serving as scripted_serving
from tonle.audit import day_ledger
from tonle.audit.index import INDEX_NAME, Index, Query
from tonle.audit.replay_records import inference_body
from tonle.cli.app import app
from tonle.errors import ConfigError, NotFound


def tonle(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    with running(tmp_path) as trail:
        ask(trail, output="ទីមួយ answer")
        ask(trail, status="failed", http_status=500, output=None, error={"message": "engine died"})
        record = trail.open(CHAT, request_id="by-name", body={**BODY, "model": "ocean"})
        record.key_id = "key-2"
        record.close("ok", http_status=200, output="=1+1", response_id="resp-3")
    return tmp_path


def test_verify_exits_0_or_1_and_names_the_file(trail: Path) -> None:
    done = tonle("verify", trail)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "3 records in 1 day: no findings" in done.stderr
    path = files(trail)[1]
    path.write_bytes(path.read_bytes().replace(b"engine died", b"all is fine"))
    done = tonle("verify", trail)
    assert done.exit_code == 1
    assert done.stdout == f"edited: {path.parent.name}/{path.name}: its content is not what was recorded\n"
    report = json.loads(tonle("verify", trail, "--json").stdout)
    assert report["findings"][0]["problem"] == "edited"
    assert report["num_records"] == 3
    assert tonle("verify", trail, "--day", "2001-01-01").exit_code == 1
    assert tonle("verify", trail / "nowhere").exit_code == 1


def test_head_and_recover(trail: Path) -> None:
    day, seq, link = tonle("head", trail).stdout.split()
    assert (day, seq) == (day_ledger.days_in(trail)[0], "3")
    assert tonle("verify", trail, "--anchor", link).exit_code == 0
    assert tonle("verify", trail, "--anchor", "0" * 64).exit_code == 1
    assert "nothing to repair" in tonle("recover", trail).stderr


@pytest.mark.parametrize(
    ("condition", "outputs"),
    [
        ([], 3),
        (["--status", "failed"], 1),
        (["--model", "ocean"], 1),
        (["--key", "key-1"], 2),
        (["--text", "ទីមួយ"], 1),
        (["--text", "ENGINE died"], 1),
        (["--text", "d"], 3),
        (["--text", 'a "quoted" thing'], 0),
        (["--since", "2001-01-01", "--until", "2001-01-02"], 0),
        (["--since", "2001-01-01T00:00+07:00"], 3),
        (["--limit", "2", "--newest"], 2),
    ],
)
def test_query(trail: Path, condition: list[str], outputs: int) -> None:
    done = tonle("query", trail, "--json", *condition)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == outputs
    assert ("1 record" if outputs == 1 else f"{outputs} records") in tonle("query", trail, *condition).stderr


def test_a_record_is_one_line_however_narrow_the_terminal(trail: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first, *lines = tonle("query", trail).stdout.splitlines()
    assert first.split() == ["Time", "Id", "Status", "Tokens", "ms", "Key", "Model"] and len(lines) == 3
    for line, record in zip(lines, records(trail), strict=True):
        assert line.split()[:3] == [record["time"][:19] + "Z", record["id"], record["status"]]
    assert f"{len(lines)} records" in tonle("query", trail, "--since", lines[0].split()[0]).stderr


def test_wrong_questions(trail: Path) -> None:
    assert tonle("query", trail, "--since", "yesterday").exit_code == 1
    assert tonle("query", trail, "--status", "great").exit_code == 1
    assert tonle("show", trail, "missing").exit_code == 1
    assert tonle("query", trail / "nowhere").exit_code == 1


def test_show_by_any_id(trail: Path) -> None:
    path = files(trail)[2]
    record = json.loads(path.read_text())
    for name in (record["id"], "by-name", "resp-3", path.name, path):
        assert tonle("show", trail, name).stdout == path.read_text()


def test_the_index_follows_the_trail(trail: Path) -> None:
    with Index(trail) as index:
        assert index.num_added == 3
    with running(trail) as more:
        ask(more, output="fourth")
    with Index(trail) as index:
        assert index.num_added == 1
        assert [row.seq for row in index.find(Query())] == [1, 2, 3, 4]
    (trail / INDEX_NAME).unlink()
    assert "4 records" in tonle("reindex", trail).stderr
    with pytest.raises(NotFound):
        Index(trail / "nowhere")


def test_the_index_works_without_full_text_search(trail: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.audit.index._TEXT_INDEX", "CREATE VIRTUAL TABLE words USING nothing")
    assert len(tonle("query", trail, "--json", "--text", "ទីមួយ").stdout.splitlines()) == 1


def test_redact_leaves_files_index_and_chain_clean(trail: Path) -> None:
    assert tonle("query", trail, "--text", "dara@example.org", "--json").stdout
    name = records(trail)[0]["id"]
    assert tonle("redact", trail, name, "--field", "user_input", "--field", "messages").exit_code == 0
    assert records(trail)[0]["messages"] == "[redacted]"
    done = tonle("redact", trail, "--all", "--pattern", "email")
    assert len(done.stdout.splitlines()) == 2
    assert tonle("query", trail, "--text", "dara@example.org", "--json").stdout == ""
    assert b"dara@example" not in (trail / INDEX_NAME).read_bytes()
    assert b"dara@example" not in b"".join(path.read_bytes() for path in trail.rglob("*.json"))
    assert tonle("verify", trail).exit_code == 0
    for wrong in (
        ["--field", "model", "x"],
        ["--field", "output"],
        [name],
        ["--all", "--field", "output", "--pattern", "email"],
    ):
        assert tonle("redact", trail, *wrong).exit_code == 1


@pytest.mark.parametrize("content", [False, True])
def test_prune(tmp_path: Path, content: bool) -> None:
    write_days(tmp_path, {"2025-01-30": 2, "2025-01-31": 1})
    with running(tmp_path) as trail:
        ask(trail)
    assert len(tonle("query", tmp_path, "--json").stdout.splitlines()) == 4
    done = tonle("prune", tmp_path, "--keep-days", 7, *(["--content"] if content else []))
    assert done.exit_code == 0, done.output
    assert "2025-01-30" in done.stdout
    assert ("from 2 records" in done.stdout) if content else ("removed 2 days" in done.stderr)
    assert "nothing to remove" in tonle("prune", tmp_path, "--keep-days", 7, *(["--content"] if content else [])).stderr
    assert len(tonle("query", tmp_path, "--json").stdout.splitlines()) == (4 if content else 1)
    assert tonle("verify", tmp_path).exit_code == 0


def test_export(trail: Path, tmp_path: Path) -> None:
    lines = tonle("export", trail).stdout.splitlines()
    assert [json.loads(line)["output"] for line in lines] == ["ទីមួយ answer", None, "=1+1"]
    table = list(csv.DictReader(io.StringIO(tonle("export", trail, "--format", "csv").stdout)))
    assert [row["output"] for row in table] == ["ទីមួយ answer", "", "'=1+1"], "no formulas for a spreadsheet"
    assert table[0]["total_tokens"] == "16"
    assert json.loads(table[1]["error"]) == {"message": "engine died"}
    file = tmp_path / "out.jsonl"
    assert tonle("export", trail, "-o", file, "--status", "failed").exit_code == 0
    assert len(file.read_text().splitlines()) == 1


def test_export_to_parquet(trail: Path, tmp_path: Path) -> None:
    from tonle.audit.export import write_parquet

    file = tmp_path / "out.parquet"
    try:
        import pyarrow.parquet as pq
    except ImportError:
        with pytest.raises(ConfigError, match="pyarrow"):
            write_parquet([], file)
        return
    assert tonle("export", trail, "--format", "parquet", "-o", file).exit_code == 0
    table = pq.read_table(file).to_pylist()
    assert [row["total_tokens"] for row in table] == [16, 16, None]


def test_replay(tmp_path: Path) -> None:
    front = FakeFront(lambda prompt, index: "the same answer" if "one" in prompt else "another answer")

    def body(text: str, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 64, **more}

    with running(tmp_path) as trail:
        ask(trail, body=body("one", temperature=0), output="the same answer")
        ask(trail, body=body("two", seed=1, stream=True), output="another thing")
        ask(trail, body=body("three"), output="by chance")
        ask(trail, body=body("four", temperature=0), status="refused", http_status=429)
    with serving(front) as url:
        done = tonle("replay", tmp_path, "--url", url)
        verdicts = [line.partition(":")[0] for line in done.stdout.splitlines()]
        assert verdicts == ["same", "different at character 8", "skipped", "skipped"]
        assert "'another thing' is now 'another answer'" in done.stdout
        assert done.exit_code == 1
        first = records(tmp_path)[0]["id"]
        assert tonle("replay", tmp_path, "--url", url, "--id", first).exit_code == 0
        done = tonle("replay", tmp_path, "--url", url, "--all")
        assert "different at character 0" in done.stdout
        done = tonle("replay", tmp_path, "--url", url, "--id", first, "--as-model", "missing")
        assert done.stdout.startswith("failed")
        assert "--as-model NAME" in done.stderr


@pytest.mark.parametrize(
    "question",
    [
        {"user_input": "one"},
        {"user_input": "one", "system_prompt": "Be kind.", "max_tokens": 20, "use_cache": False},
        {"user_input": "one", "stream": True},
        {
            "user_input": "one",
            "conversation_history": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi!"},
            ],
        },
    ],
)
def test_replay_of_the_inference_service(tmp_path: Path, question: dict[str, Any]) -> None:
    prompts: list[str] = []

    def answer(prompt: str, index: int) -> str:
        prompts.append(prompt)
        return "the same answer" if "one" in prompt else "another answer"

    with serving(FakeFront(answer), audit_dir=str(tmp_path / "audit")) as url:
        reply = httpx.post(f"{url}/api/v1/inference", json=question)
        assert reply.status_code == 200 and "the same answer" in reply.text.replace('"}\n\ndata: {"response":"', "")
    assert [record["endpoint"] for record in records(tmp_path / "audit")] == ["/api/v1/inference"]
    with serving(FakeFront(answer)) as url:
        done = tonle("replay", tmp_path / "audit", "--url", url)
    assert done.stdout.startswith("same: "), done.output
    assert prompts[0] == prompts[1], "what the model is asked is the same, too"
    with serving(FakeFront(lambda prompt, index: "the other answer")) as url:
        done = tonle("replay", tmp_path / "audit", "--url", url)
    assert done.stdout.startswith("different at character 4"), done.output


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 9, "temperature": 0, "system": "Be kind.",
                          "messages": [{"role": "user", "content": "one"}]}),
        ("/api/chat", {"options": {"temperature": 0}, "messages": [{"role": "user", "content": "one"}]}),
        ("/api/generate", {"options": {"temperature": 0}, "prompt": "one"}),
        ("/api/generate", {"options": {"temperature": 0}, "prompt": "one", "raw": True, "stream": False}),
    ],
)  # fmt: skip
def test_replay_of_translated_apis(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    prompts: list[str] = []

    def answer(prompt: str, index: int) -> str:
        prompts.append(prompt)
        return "the same answer"

    with serving(FakeFront(answer), audit_dir=str(tmp_path / "audit")) as url:
        assert httpx.post(url + path, json=body).status_code == 200
    with serving(FakeFront(answer)) as url:
        done = tonle("replay", tmp_path / "audit", "--url", url)
    assert done.stdout.startswith("same: "), done.output
    assert prompts[0] == prompts[1] and "one" in prompts[0]


@pytest.mark.parametrize("messages", [None, [], "x", [5], [{"role": "assistant", "content": "x"}]])
def test_a_record_that_no_inference_service_writes_is_not_replayed(messages: Any) -> None:
    assert inference_body({"messages": messages}) is None


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three records that can be replayed."""
    with running(tmp_path) as trail:
        for name in ("one", "two", "three"):
            body = {"messages": [{"role": "user", "content": name}], "max_tokens": 64, "temperature": 0}
            ask(trail, body=body, output="yes")
    return tmp_path


def replies(*replies: list[Step]) -> Behaviour:
    return Behaviour(script=lambda asked: replies[asked.number])


YES: list[Step] = [json_reply(200, {"choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}]})]


def test_replay_without_a_server_stops_at_once(three: Path) -> None:
    done = tonle("replay", three, "--url", "127.0.0.1:9")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "Error: no server answers at http://127.0.0.1:9 (connection refused: 127.0.0.1:9). Is it"
    )
    assert tonle("replay", three, "--url", "http://[::1").exit_code == 1


def test_replay_says_how_to_give_a_key(three: Path) -> None:
    with scripted_serving(Behaviour(key="right", script=lambda asked: YES)) as server:
        done = tonle("replay", three, "--url", server.url)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "needs an API key (no such key). Give one with --api-key or OPENAI_API_KEY." in done.stderr
        assert len(server.asked) == 1, "the key is as wrong for the others"
        assert tonle("replay", three, "--url", server.url, "--api-key", "right").exit_code == 0
        assert {asked.path for asked in server.asked} == {CHAT}


def test_a_request_that_fails_does_not_end_the_replay(three: Path) -> None:
    refused: list[Step] = [json_reply(500, {"error": {"message": "out of\norder"}})]
    with scripted_serving(replies(YES, refused, [Cut()], [Cut()])) as server:
        done = tonle("replay", three, "--url", server.url)
    first, second, third = done.stdout.splitlines()
    assert first.startswith("same: ") and second.endswith(": the server says 500: out of order")
    assert third.endswith("broke: connection closed: by the server, before it answered")
    assert (done.exit_code, done.stderr) == (1, "1 same, 2 failed\n")


def test_an_answer_that_takes_too_long(three: Path) -> None:
    with scripted_serving(replies([30.0])) as server:
        done = tonle("replay", three, "--url", server.url, "--limit", "1", "--timeout", "0.2")
    assert done.exit_code == 1 and "timeout: " in done.stdout and "0.2 s" in done.stdout


def test_replay_points_to_the_model_behind_an_alias(tmp_path: Path) -> None:
    front = FakeFront(lambda prompt, index: "the same answer")
    with running(tmp_path) as trail:
        record = trail.open(CHAT, request_id="r", body={**BODY, "tools": None, "model": "smol"})
        record.note(model="smol", route={"backend": "b0", "model": front.name, "why": "only"})
        record.close("ok", http_status=200, output="the same answer")
    with serving(front) as url:
        done = tonle("replay", tmp_path, "--url", url)
        assert done.exit_code == 1 and f"it was answered by {front.name}" in done.stdout
        assert f"--as-model {front.name}." in done.stderr
        again = tonle("replay", tmp_path, "--url", url, "--as-model", front.name)
        assert again.exit_code == 0, again.output
        assert "--as-model" not in again.stderr
