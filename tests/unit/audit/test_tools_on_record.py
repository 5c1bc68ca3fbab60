"""Tools, tool calls, tool results and reasoning: all on record, all masked, and never without bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.audit.test_redaction_everywhere import MAIL, TRAILS, on_disk
from tests.unit.audit.trails import CHAT, records, running
from tonle.audit import Answer
from tonle.audit.index import Index, Query
from tonle.audit.replay_records import ServerReply, replay
from tonle.audit.verify import verify
from tonle.protocol.bounded_json import decode_json

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "send_mail",
        "description": "Sends a mail.",
        "parameters": {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]},
    },
}
CALL_ID = "call_0123456789012345678901ab"  # its digits look like a phone number's


def loop_body(**changes: str) -> dict[str, Any]:
    """The second request of an agent loop; `changes` put words into one of its places."""
    tool = json.loads(json.dumps(TOOL))
    tool["function"]["description"] = changes.get("description", "Sends a mail.")
    call = {"name": "send_mail", "arguments": json.dumps({"to": changes.get("arguments", "a friend")})}
    return {
        "model": "river",
        "messages": [
            {"role": "user", "content": "Write to Dara."},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": changes.get("earlier reasoning", ""),
                "tool_calls": [{"id": CALL_ID, "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": CALL_ID, "content": changes.get("result", "sent")},
        ],
        "tools": [tool],
        "tool_choice": "required",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"title": changes.get("schema", "t")}}},
        "temperature": 0,
    }


def called(*, reasoning: str = "", arguments: str = "{}", call_id: str = CALL_ID) -> Answer:
    answer = Answer()
    if reasoning:
        answer.add_reasoning(0, reasoning, 1.0)
    answer.add_call(0, 0, call_id, "send_mail", 1.0)
    answer.add_arguments(0, 0, arguments, 2.0)
    answer.choices[0].finish_reason = "tool_calls"
    answer.finish()
    return answer


@TRAILS
def test_all_of_it_is_on_record(tmp_path: Path, start: Any) -> None:
    body = loop_body()
    with start(tmp_path) as trail:
        record = trail.open(CHAT, body=json.dumps(body).encode())
        record.close("ok", http_status=200, answer=called(reasoning="To whom?", arguments='{"to":"Dara"}'))
    [written] = records(tmp_path)
    assert written["messages"] == body["messages"]
    assert {name: written["parameters"][name] for name in ("tools", "tool_choice", "response_format")} == {
        name: body[name] for name in ("tools", "tool_choice", "response_format")
    }
    call = {"id": CALL_ID, "type": "function", "function": {"name": "send_mail", "arguments": '{"to":"Dara"}'}}
    assert written["choices"] == [
        {"index": 0, "text": "", "reasoning": "To whom?", "tool_calls": [call], "finish_reason": "tool_calls"}
    ]
    assert (written["output"], written["finish_reason"]) == ("", "tool_calls")
    with Index(tmp_path) as index:
        assert len(list(index.find(Query(text='Dara"}')))) == 1
        assert len(list(index.find(Query(text="To whom?")))) == 1
    assert verify(tmp_path).ok


@pytest.mark.parametrize(
    "place", ["arguments", "result", "description", "schema", "earlier reasoning", "its reasoning", "its arguments"]
)
def test_masking_reaches_every_place_of_it(tmp_path: Path, place: str) -> None:
    escaped = MAIL.replace("@", r"\u0040")
    arguments = f'{{"to":"{escaped}"}}' if place == "its arguments" else "{}"
    answer = called(reasoning=MAIL if place == "its reasoning" else "", arguments=arguments)
    with running(tmp_path, redact=("email", "phone")) as trail:
        record = trail.open(CHAT, body=json.dumps(loop_body(**{place: MAIL})).encode())
        record.close("ok", http_status=200, answer=answer)
        assert trail.flush()
        assert MAIL not in on_disk(tmp_path)
    [written] = records(tmp_path)
    assert written["masked"] == {"email": 1}  # and no id is taken for a phone number
    assert written["messages"][1]["tool_calls"][0]["id"] == CALL_ID
    assert written["choices"][0]["tool_calls"][0]["id"] == CALL_ID
    assert written["choices"][0]["tool_calls"][0]["function"]["name"] == "send_mail"


def test_a_long_answer_loses_arguments_and_keeps_ids_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.audit.shorten.MAX_ANSWER_CHARS", 10_000)
    monkeypatch.setattr("tonle.audit.shorten.KEPT_CHARS", 100)
    with running(tmp_path) as trail:
        trail.open(CHAT, body=b"{}").close("ok", http_status=200, answer=called(arguments="x" * 20_000))
    [written] = records(tmp_path)
    [call] = written["choices"][0]["tool_calls"]
    assert (call["id"], call["function"]["name"]) == (CALL_ID, "send_mail")
    assert call["function"]["arguments"].startswith("x" * 100 + " [cut: 20000 characters in all, SHA-256 ")


def large_schema(num_bytes: int) -> dict[str, Any]:
    """As tools of business systems have them: short names, enums, nested objects and lists of objects."""
    properties: dict[str, Any] = {}
    while len(json.dumps(properties)) < num_bytes:
        name = f"field_{len(properties)}"
        line = {
            "type": "object",
            "properties": {
                "sku": {"type": "string", "minLength": 1},
                "amount": {"type": "number", "minimum": 0.5},
                "unit": {"type": "string", "enum": ["kg", "l", "pc"]},
            },
            "required": ["sku", "amount"],
            "additionalProperties": False,
        }
        properties[name] = (
            {"type": "array", "items": line} if len(properties) % 2 else {"anyOf": [line, {"type": "null"}]}
        )
    return {"type": "object", "properties": properties}


def test_128_tools_with_schemas_of_8_kb_are_accepted_and_on_record_as_they_came(tmp_path: Path) -> None:
    tools = [
        {"type": "function", "function": {"name": f"tool_{number}", "parameters": large_schema(8_000)}}
        for number in range(128)
    ]
    raw = json.dumps({**loop_body(), "tools": tools}).encode()
    assert len(raw) > 1_000_000
    assert decode_json(raw)["tools"] == tools
    assert decode_json(json.dumps({"tools": tools}, separators=(",", ":")).encode())["tools"] == tools
    with running(tmp_path) as trail:
        trail.open(CHAT, body=raw).close("ok", http_status=200, answer=called())
    [written] = records(tmp_path)
    assert written["parameters"]["tools"] == tools


@pytest.mark.parametrize(("arguments", "verdict"), [('{"to":"Dara"}', "same"), ('{"to":"Sok"}', "different")])
def test_replay_compares_calls_and_not_their_ids(tmp_path: Path, arguments: str, verdict: str) -> None:
    with running(tmp_path) as trail:
        record = trail.open(CHAT, body=json.dumps(loop_body()).encode())
        record.close("ok", http_status=200, answer=called(reasoning="Hm.", arguments='{"to":"Dara"}'))
    [written] = records(tmp_path)
    sent: list[dict[str, Any]] = []

    def send(path: str, body: dict[str, Any]) -> ServerReply:
        sent.append(body)
        call = {"id": "call_new", "type": "function", "function": {"name": "send_mail", "arguments": arguments}}
        message = {"content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
        reply = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
        return ServerReply(200, "application/json", json.dumps(reply).encode())

    [outcome] = replay([written], send)
    assert outcome.verdict == verdict
    assert (sent[0]["tools"], sent[0]["messages"]) == ([TOOL], loop_body()["messages"])
