"""Tools, structured output and thoughts with the real default model, by OpenAI's own client."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.documents.code_blocks import python_blocks
from tests.fakes.server import tonle_serve

pytestmark = pytest.mark.model

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "maxItems": 3},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"type": "string", "pattern": "^[A-Z]{3}$"}}, "required": ["zone"]}
SCHEMAS = {"get_weather": WEATHER, "get_time": TIME}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "Look it up.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NO_THOUGHTS = {"enable_thinking": False}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class Forecast(BaseModel):
    sky: Literal["sunny", "cloudy"]
    degrees: int = Field(ge=-50, le=60)


@pytest.fixture(scope="module")
def client(default_model: object) -> Iterator[openai.OpenAI]:
    with (
        tonle_serve(None, "--reasoning-parser", "think") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield client


def chat(client: openai.OpenAI, *, extra_body: Any = None, **fields: Any) -> Any:
    """Without thoughts, unless `extra_body` says otherwise."""
    given: Any = {"model": model(client), "messages": ASK, "max_tokens": 120} | fields
    return client.chat.completions.create(**given, extra_body={**NO_THOUGHTS, **(extra_body or {})})


@functools.cache
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def check(call: Any) -> None:
    """Its arguments are what the schema of its tool says."""
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_required_calls_are_valid_at_any_temperature(client: openai.OpenAI) -> None:
    for fields in ({"temperature": 1.0}, {"temperature": 2.0, "parallel_tool_calls": False}):
        for choice in chat(client, tools=TOOLS, tool_choice="required", n=3, seed=1, max_tokens=400, **fields).choices:
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls) >= 1
            for call in choice.message.tool_calls:
                check(call)


def test_a_named_call_streamed_is_the_same(client: openai.OpenAI) -> None:
    fields = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_time"}}, "temperature": 0}
    whole = chat(client, **fields).choices[0]
    (call,) = whole.message.tool_calls
    check(call)
    assert call.function.name == "get_time" and whole.finish_reason == "stop"
    chunks = [chunk.choices[0] for chunk in chat(client, **fields, stream=True)]
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    assert pieces[0].id and pieces[0].function.name == "get_time" and pieces[0].function.arguments == ""
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert chunks[-1].finish_reason == "stop"


def test_the_clients_helpers(client: openai.OpenAI) -> None:
    shared: Any = {"model": model(client), "messages": ASK, "max_tokens": 80, "extra_body": NO_THOUGHTS}
    parsed = client.chat.completions.parse(response_format=Forecast, temperature=1, seed=3, **shared)
    assert isinstance(parsed.choices[0].message.parsed, Forecast)
    tool = openai.pydantic_function_tool(Forecast)
    fields: Any = {
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1,
        "seed": 4,
    }
    parsed = client.chat.completions.parse(**shared, **fields)
    (call,) = parsed.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Forecast)
    with client.chat.completions.stream(**shared, **fields) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or ()
    assert streamed.function.parsed_arguments == call.function.parsed_arguments, "the same seed, the same draws"


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_choice": ["sunny", "ភ្លៀង"]}, "sunny|ភ្លៀង"),
        ({"structured_outputs": {"regex": "[0-9]{2} degrees"}}, "[0-9]{2} degrees"),
        ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 300, "temperature": 0}, None),
        ({"json_schema": json.dumps(WEATHER)}, None),
        ({"bad_words": [" the", "The", "is"]}, "(?s)(?!.*( the|The|is)).*"),
    ],
)
def test_other_servers_fields(client: openai.OpenAI, body: dict[str, Any], pattern: str | None) -> None:
    text = chat(client, extra_body=body, seed=5, max_tokens=40).choices[0].message.content
    if pattern is not None:
        assert re.fullmatch(pattern, text), text
    else:
        assert isinstance(json.loads(text), dict)


def test_completions_take_them_too(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model=model(client), prompt="The sky is", max_tokens=20, extra_body={"regex": "(blue|grey)!"}
    )
    assert completion.choices[0].text in ("blue!", "grey!")


def test_tools_and_a_schema_for_the_answer(client: openai.OpenAI) -> None:
    """The model may call or answer; both are bound."""
    schema = {"type": "json_schema", "json_schema": {"name": "f", "schema": WEATHER, "strict": True}}
    for choice in chat(client, tools=TOOLS, response_format=schema, n=4, seed=2, max_tokens=300).choices:
        if choice.message.tool_calls:
            for call in choice.message.tool_calls:
                check(call)
        else:
            jsonschema.validate(json.loads(choice.message.content), WEATHER)


def test_an_agent_loop(client: openai.OpenAI) -> None:
    messages = list(ASK)
    for _ in range(2):
        message = chat(client, messages=messages, tools=TOOLS, tool_choice="required", seed=1).choices[0].message
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    final = chat(client, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=16).choices[0]
    assert final.message.content and not final.message.tool_calls


def test_thoughts_have_a_budget_and_come_before_the_structure(client: openai.OpenAI) -> None:
    opened = {"add_generation_prompt": False, "continue_final_message": True, "thinking_token_budget": 8,
              "enable_thinking": True}  # fmt: skip
    messages = [*ASK, {"role": "assistant", "content": "<think>"}]
    schema = {"type": "json_schema", "json_schema": {"name": "f", "schema": Forecast.model_json_schema()}}
    reply = chat(client, messages=messages, response_format=schema, extra_body=opened, seed=6)
    message, usage = reply.choices[0].message, reply.usage
    Forecast.model_validate_json(message.content)
    assert message.reasoning_content and "<" not in message.reasoning_content
    # the budget, and the tokens that close the thought
    assert 0 < usage.completion_tokens_details.reasoning_tokens <= 8 + 8 < usage.completion_tokens


def test_the_examples_of_the_document(client: openai.OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/tools.md, as a reader would run it."""
    names: dict[str, Any] = {}
    blocks = list(python_blocks(Path(__file__).parents[2] / "docs" / "tools.md"))
    assert len(blocks) >= 3
    for block in blocks:
        # the server of these tests reads thoughts, which the default model does not have
        source = block.source.replace("http://127.0.0.1:8000/v1", str(client.base_url)).replace(
            '"max_tokens": 200', '"max_tokens": 60, "extra_body": {"enable_thinking": False}'
        )
        source = source.replace("max_tokens=200", 'max_tokens=200, extra_body={"enable_thinking": False}')
        exec(compile(source, str(block), "exec"), names)
    assert '{"city": "' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"guided_regex": "(a"}}, "guided_regex"),
        ({"extra_body": {"guided_json": {"$ref": "https://a.example/b"}}}, "guided_json"),
        ({"extra_body": {"guided_grammar": "start: nothing"}}, "guided_grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": {"not": {}}}}}, "response_format"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
            "tools[0].function.parameters",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_held_to_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refusal:
            chat(client, stream=stream, **fields)
        assert refusal.value.param == param
