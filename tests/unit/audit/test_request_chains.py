"""Chains of requests in trails whose writers noted no links, in old trails, and after redaction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.unit.audit.trails import CHAT, make_chain, records, running
from tonle.audit import Answer, AuditTrail
from tonle.audit.chain import PendingRecord
from tonle.audit.index import Index, Query
from tonle.audit.record import Record
from tonle.audit.seal import fields_of
from tonle.audit.verify import verify
from tonle.cli.app import app
from tonle.errors import NotFound

TOOLS = ["call_aaaaaaaa", "call_bbbbbbbb"]


def called(*ids: str) -> Answer:
    answer = Answer()
    for place, call_id in enumerate(ids):
        answer.add_call(0, place, call_id, "f", 1.0)
    answer.finish()
    return answer


def asked(*ids: str, **fields: Any) -> bytes:
    results = [{"role": "tool", "tool_call_id": call_id, "content": "x"} for call_id in ids]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}, *results], **fields}).encode()


def record(trail: AuditTrail, body: bytes, *, key: str | None = None, path: str = CHAT, **close: Any) -> Record:
    made = trail.open(path, body=body)
    made.key_id = key
    made.close(**({"status": "ok", "http_status": 200} | close))
    assert trail.flush()
    return made


def loop(trail: AuditTrail) -> list[str]:
    """Three records of one loop, and one of another, as a middleware writes them: without links."""
    made = [
        record(trail, asked(), answer=called(TOOLS[0])),
        record(trail, asked(), answer=called("call_elsewhere")),
        record(trail, asked(TOOLS[0]), answer=called(TOOLS[1])),
        record(trail, asked(*TOOLS), answer=called()),
    ]
    return [each.id for each in made]


def chain(directory: Path, name: str) -> list[str | None]:
    with Index(directory) as index:
        return [row.id for row in index.find(Query(chain=name))]


def tonle(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_links_that_were_not_noted_are_found(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        first, alone, *others = loop(trail)
    for name in (first, others[-1]):
        assert chain(tmp_path, name) == [first, *others]
    assert chain(tmp_path, alone) == [alone]
    with pytest.raises(NotFound, match="no record has the id"):
        chain(tmp_path, "0" * 32)


def test_the_index_grows_and_is_rebuilt_to_the_same(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        first = record(trail, asked(), answer=called(TOOLS[0]))
        assert chain(tmp_path, first.id) == [first.id]
        second = record(trail, asked(TOOLS[0]), answer=called())
    assert chain(tmp_path, first.id) == [first.id, second.id]
    with Index(tmp_path, rebuild=True):
        pass
    assert chain(tmp_path, second.id) == [first.id, second.id]


@pytest.mark.parametrize(("keys", "is_linked"), [(("a", "a"), True), (("a", "b"), False), ((None, "a"), False)])
def test_only_records_of_one_key_are_linked(
    tmp_path: Path, keys: tuple[str | None, str | None], *, is_linked: bool
) -> None:
    with running(tmp_path) as trail:
        first = record(trail, asked(), key=keys[0], answer=called(TOOLS[0]))
        second = record(trail, asked(TOOLS[0]), key=keys[1], answer=called())
    assert (second.id in chain(tmp_path, first.id)) is is_linked


def test_records_without_the_fields_are_linked_and_verified(tmp_path: Path) -> None:
    """Those of older versions."""
    with running(tmp_path / "new") as trail:
        first, alone, *others = loop(trail)
    old = make_chain(tmp_path / "old")
    for path in sorted(
        (tmp_path / "new").glob("*-*-*/chat_*.json"), key=lambda path: json.loads(path.read_text())["time"]
    ):
        content = json.loads(path.read_text())
        assert content.pop("chain_id") == content["id"]
        content.pop("previous_id")
        old.append([PendingRecord(path.parent.name, path.name, fields_of(json.dumps(content).encode()))])
        old.sign()
    assert "chain_id" not in records(tmp_path / "old")[0]
    assert verify(tmp_path / "old").ok
    assert chain(tmp_path / "old", first) == [first, *others]
    assert chain(tmp_path / "old", alone) == [alone]


def test_streams_and_whole_replies_of_other_apis_are_linked_too(tmp_path: Path) -> None:
    reply = {"id": "resp_00000001", "object": "response", "output": [{"type": "function_call", "call_id": TOOLS[0]}]}
    block = {"type": "tool_use", "id": "toolu_00000001", "name": "f", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_00000001", "content": "x"}]}
    with running(tmp_path) as trail:
        one = record(trail, b'{"input":"hi"}', path="/v1/responses", answer=Answer(raw=reply))
        two = record(
            trail, b'{"input":"so?","previous_response_id":"resp_00000001"}', path="/v1/responses", output="so."
        )
        item = {"type": "function_call_output", "call_id": TOOLS[0], "output": "x"}
        three = record(trail, json.dumps({"input": [item]}).encode(), path="/v1/responses", output="well.")
        four = record(trail, asked(), path="/v1/messages", answer=Answer(raw={"content": [block]}))
        five = record(trail, json.dumps({"messages": [result]}).encode(), path="/v1/messages", output="ok.")
    assert chain(tmp_path, one.id) == [one.id, two.id, three.id]
    assert chain(tmp_path, five.id) == [four.id, five.id]


def test_odd_values_in_the_fields_are_not_written(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        made = trail.open(CHAT, body=asked())
        made.note(chain_id="dara@example.org", previous_id=["x"])
        made.close("ok", http_status=200)
    [written] = records(tmp_path)
    assert (written["chain_id"], written["previous_id"]) == (made.id, None)


def test_a_redacted_request_leaves_the_rest_of_its_chain(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        first = record(trail, asked(), answer=called(TOOLS[0]))
        second = trail.open(CHAT, body=asked(TOOLS[0]))
        second.previous_id, second.chain_id = first.id, first.id
        second.close("ok", http_status=200, answer=called(TOOLS[1]))
        third = record(trail, asked(*TOOLS), answer=called())
    assert chain(tmp_path, first.id) == [first.id, second.id, third.id]
    assert tonle("redact", tmp_path, second.id, "--field", "messages", "--field", "choices").exit_code == 0
    assert chain(tmp_path, first.id) == [first.id, second.id, third.id]
    assert verify(tmp_path).ok


def test_the_command_line(tmp_path: Path) -> None:
    with running(tmp_path) as trail:
        first, alone, *others = loop(trail)
    done = tonle("query", tmp_path, "--chain", others[0], "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["id"] for row in rows] == [first, *others]
    assert [row["previous_id"] for row in rows] == [None, first, others[0]]
    exported = tonle("export", tmp_path, "--chain", alone)
    assert [json.loads(line)["id"] for line in exported.stdout.splitlines() if line.startswith("{")] == [alone]
    assert tonle("query", tmp_path, "--chain", "nothing").exit_code == 1
