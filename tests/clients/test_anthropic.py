"""Anthropic's client against the real server and the default model: messages, streams, tools, counting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import KEY, Place

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
pytestmark = pytest.mark.model

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "name": "get_weather", "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city", "days"], "additionalProperties": False,
    },
}  # fmt: skip


@pytest.fixture
def client(gateway: Place) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=gateway.url.removesuffix("/v1"), api_key=KEY, max_retries=0) as found:
        yield found


def test_a_message_streamed_and_whole(client: Any, gateway: Place) -> None:
    asked = {
        "model": gateway.model,
        "max_tokens": 24,
        "messages": ASK,
        "system": "Be brief.",
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**asked)
    assert whole.content[0].type == "text" and whole.content[0].text and whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert "".join(pieces) == streamed.content[0].text == whole.content[0].text and len(pieces) > 1
    assert streamed.stop_reason == whole.stop_reason and streamed.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=gateway.model, messages=ASK, system="Be brief.").input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert client.messages.count_tokens(model=gateway.model, messages=ASK, tools=[WEATHER]).input_tokens > counted


def test_the_server_itself(places: dict[str, Place]) -> None:
    place = places["serve"]
    with anthropic.Anthropic(base_url=place.url.removesuffix("/v1"), api_key="unused", max_retries=0) as client:
        asked = {"model": place.model, "max_tokens": 4, "messages": ASK}
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        assert streamed.content[0].text and streamed.stop_reason == "max_tokens" and streamed.usage.output_tokens == 4
        assert client.messages.count_tokens(model=place.model, messages=ASK).input_tokens > 4


def test_a_stop_sequence_and_a_beginning_of_the_answer(client: Any, gateway: Place) -> None:
    begun = [*ASK, {"role": "assistant", "content": "The capital of France is"}]
    reply = client.messages.create(
        model=gateway.model, max_tokens=24, messages=begun, stop_sequences=["."], extra_body={"temperature": 0}
    )
    assert "Paris" in reply.content[0].text
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", ".")


def test_a_loop_of_tools(client: Any, gateway: Place) -> None:
    asked = {
        "model": gateway.model,
        "max_tokens": 48,
        "tools": [WEATHER],
        "extra_body": {"temperature": 0, "seed": None},
    }
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris for 3 days?"}]
    with client.messages.stream(
        **asked, messages=messages, tool_choice={"type": "tool", "name": "get_weather"}
    ) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_message()
    assert "input_json" in kinds and first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.name == "get_weather" and set(call.input) == {"city", "days"} and 1 <= call.input["days"] <= 7
    result = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps({"sky": "clear", "celsius": 21})}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(**asked, messages=messages, tool_choice={"type": "none"})
    assert last.content[0].type == "text" and last.stop_reason in ("end_turn", "max_tokens")


def test_a_schema_for_the_answer(client: Any, gateway: Place) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Phnom Penh"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    reply = client.messages.create(
        model=gateway.model,
        max_tokens=60,
        messages=ASK,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert json.loads(reply.content[0].text)["city"] in ("Paris", "Phnom Penh")


def test_errors(client: Any, gateway: Place) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="claude-x", max_tokens=5, messages=ASK)
    assert unknown.value.body["error"]["type"] == "not_found_error" and unknown.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(
            model=gateway.model, max_tokens=5, messages=[{"role": "user", "content": "word " * 20_000}]
        )
