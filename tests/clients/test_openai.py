"""OpenAI's own client: tools, streamed and whole, parsed answers, and an agent's loop that stands in the trail as one chain."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.conftest import KEY, Place
from tests.clients.weather import MAX_TOKENS, QUESTION, SCHEMAS, TOOLS, Report, check_call, tool_choice
from tonle.audit.index import Index, Query, Row
from tonle.audit.record_file import read_record
from tonle.audit.verify import verify

pytestmark = pytest.mark.model


@pytest.fixture
def client(place: Place) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=place.url, api_key=KEY, max_retries=0, timeout=240) as client:
        yield client


def ask(client: Any, place: Place, **fields: Any) -> Any:
    asked = {"model": place.model, "messages": QUESTION, "temperature": 0, "max_completion_tokens": MAX_TOKENS}
    return client.create(**(asked | fields))


def test_a_required_call_has_valid_arguments(client: openai.OpenAI, place: Place) -> None:
    answer = ask(client.chat.completions, place, tools=TOOLS, tool_choice="required")
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        check_call(call.function.name, json.loads(call.function.arguments))


def test_a_streamed_call_is_the_same_as_a_whole_one(client: openai.OpenAI, place: Place) -> None:
    fields = {"tools": TOOLS, "tool_choice": tool_choice("set_alarm")}
    [whole] = ask(client.chat.completions, place, **fields).choices[0].message.tool_calls
    names, arguments, ids, reasons = "", "", [], []
    for chunk in ask(client.chat.completions, place, stream=True, **fields):
        for choice in chunk.choices:
            reasons.append(choice.finish_reason)
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                ids += [call.id] if call.id else []
                names += call.function.name or ""
                arguments += call.function.arguments or ""
    assert (names, arguments, len(ids)) == ("set_alarm", whole.function.arguments, 1)
    assert [reason for reason in reasons if reason] in (
        ["tool_calls"],
        ["stop"],
    )  # of a named function OpenAI says stop
    check_call("set_alarm", json.loads(arguments))


def test_the_clients_own_stream_helper(gateway: Place) -> None:
    client = openai.OpenAI(base_url=gateway.url, api_key=KEY, max_retries=0, timeout=240)
    asked: Any = {"model": gateway.model, "messages": QUESTION, "max_completion_tokens": MAX_TOKENS, "temperature": 0}
    with client.chat.completions.stream(**asked, tools=TOOLS, tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    [call, *_] = final.choices[0].message.tool_calls or ()
    check_call(call.function.name, json.loads(call.function.arguments))


def test_an_answer_is_parsed_into_a_type(client: openai.OpenAI, place: Place) -> None:
    answer = client.chat.completions.parse(
        model=place.model, messages=QUESTION, response_format=Report, max_completion_tokens=MAX_TOKENS, temperature=1
    )
    assert isinstance(answer.choices[0].message.parsed, Report)


def chain(place: Place, name: str, num_records: int) -> list[Row]:
    """Records are written a moment after their answers."""
    for _ in range(2400):
        with Index(place.audit_dir) as index:
            rows = list(index.find(Query(chain=name)))
        if len(rows) >= num_records:
            return rows
        time.sleep(0.05)
    raise AssertionError(rows)


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_three_calls_through_the_gateway_is_one_chain(gateway: Place, *, stream: bool) -> None:
    place, messages, chains, last = gateway, list(QUESTION), set(), ""
    with openai.OpenAI(base_url=place.url, api_key=KEY, max_retries=0, timeout=240) as client:
        for name in SCHEMAS:
            raw = ask(client.chat.completions.with_raw_response, place, messages=messages, tools=TOOLS, stream=stream,
                      tool_choice=tool_choice(name), temperature=1)  # fmt: skip
            chains.add(raw.headers["x-tonle-chain"])
            last = raw.headers["x-request-id"]
            call = streamed_call(raw.parse()) if stream else whole_call(raw.parse())
            assert call["function"]["name"] == name
            check_call(name, json.loads(call["function"]["arguments"]))
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": '{"ok": true}'})
        answer = ask(client.chat.completions, place, messages=messages, tools=TOOLS, tool_choice="none",
                     max_completion_tokens=8)  # fmt: skip
        assert answer.choices[0].message.content
    assert len(chains) == 1
    rows = chain(place, last, 4)
    assert [row.previous_id for row in rows] == [None, *[row.id for row in rows[:-1]]]
    assert {row.chain_id for row in rows} == chains == {rows[0].id}
    assert [row.status for row in rows] == ["ok"] * 4
    called = [read_record(place.audit_dir / row.day / row.file)["choices"] for row in rows[:3]]
    assert [choices[0]["tool_calls"][0]["function"]["name"] for choices in called] == list(SCHEMAS)
    assert verify(place.audit_dir).ok


def whole_call(answer: Any) -> dict[str, Any]:
    [call] = answer.choices[0].message.tool_calls
    return dict(call.model_dump(exclude_none=True))


def streamed_call(chunks: Any) -> dict[str, Any]:
    call: dict[str, Any] = {"type": "function", "function": {"name": "", "arguments": ""}}
    for chunk in chunks:
        for delta in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
            call["id"] = delta.id or call.get("id")
            call["function"]["name"] += delta.function.name or ""
            call["function"]["arguments"] += delta.function.arguments or ""
    return call
