"""OpenAI's own client at /v1/responses, with the default model: text, events, parsed answers, and a loop of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.conftest import KEY, Place
from tests.clients.weather import MAX_TOKENS, SCHEMAS, Report, check_call

pytestmark = pytest.mark.model

QUESTION = "How is the weather in Phnom Penh?"
TOOLS: Any = [
    {"type": "function", "name": name, "description": name.replace("_", " "), "parameters": schema, "strict": True}
    for name, schema in SCHEMAS.items()
]


@pytest.fixture
def place(gateway: Place) -> Place:
    """The server behind it is the same program; `tests/http/test_responses.py` asks one directly."""
    return gateway


@pytest.fixture
def client(place: Place) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=place.url, api_key=KEY, max_retries=0, timeout=240) as client:
        yield client


def asked(place: Place, **fields: Any) -> dict[str, Any]:
    return {"model": place.model, "input": QUESTION, "temperature": 0, "max_output_tokens": MAX_TOKENS, **fields}


def test_text_and_events_are_those_of_chat(client: openai.OpenAI, place: Place) -> None:
    chat = client.chat.completions.create(
        model=place.model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_completion_tokens=24
    )
    fields = asked(place, max_output_tokens=24)
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    final: Any = events[-1]
    texts = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert chat.usage is not None and whole.usage is not None
    assert whole.output_text == texts == final.response.output_text == chat.choices[0].message.content
    assert whole.usage.total_tokens == final.response.usage.total_tokens == chat.usage.total_tokens
    assert whole.status == final.response.status
    assert whole.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    assert final.type == f"response.{whole.status}"


def test_a_parsed_answer_whole_and_streamed(client: openai.OpenAI, place: Place) -> None:
    whole = client.responses.parse(**asked(place), text_format=Report)
    with client.responses.stream(**asked(place), text_format=Report) as stream:
        final = stream.get_final_response()
    assert isinstance(whole.output_parsed, Report) and final.output_parsed == whole.output_parsed


def test_a_loop_of_tools_by_id(client: openai.OpenAI, place: Place) -> None:
    previous: Any = openai.omit
    given: Any = QUESTION
    for number, name in enumerate(("get_weather", "get_time", "set_alarm")):
        choice: Any = {"type": "function", "name": name} if number else "required"
        fields = asked(place, input=given, tools=TOOLS, tool_choice=choice, previous_response_id=previous)
        if number == 1:
            with client.responses.stream(**fields) as stream:
                response: Any = stream.get_final_response()
        else:
            response = client.responses.create(**fields)
        calls = [item for item in response.output if item.type == "function_call"]
        assert calls and (not number or {call.name for call in calls} == {name})
        for call in calls:
            check_call(call.name, json.loads(call.arguments))
        given = [{"type": "function_call_output", "call_id": call.call_id, "output": '{"ok": true}'} for call in calls]
        previous = response.id
    last = client.responses.create(
        **asked(place, input=given, tools=TOOLS, tool_choice="none", previous_response_id=previous)
    )
    assert last.output_text and all(item.type == "message" for item in last.output)
    again = client.responses.create(**asked(place, input="Thanks!", previous_response_id=last.id, max_output_tokens=4))
    assert again.usage is not None and last.usage is not None and again.usage.input_tokens > 100


def test_stored_responses(client: openai.OpenAI, place: Place) -> None:
    made = client.responses.create(**asked(place, metadata={"topic": "weather"}, max_output_tokens=4))
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    (item,) = client.responses.input_items.list(made.id).data
    assert item.content[0].text == QUESTION  # type: ignore[union-attr]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_not_found"):
        client.responses.create(**asked(place, previous_response_id=made.id))


def test_errors_of_the_model_speak_of_this_apis_fields(client: openai.OpenAI, place: Place) -> None:
    bad: Any = {
        "format": {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": 5}, "strict": True}
    }
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asked(place, text=bad))
    assert "response_format" not in refused.value.message and (refused.value.param or "").startswith("text.format")
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(**asked(place, input="word " * 40000))
    assert long.value.code == "context_length_exceeded"
