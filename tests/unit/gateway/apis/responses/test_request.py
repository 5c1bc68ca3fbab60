"""The body of POST /v1/responses: what becomes of each field, and that no body does more than get a 400."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tonle.errors import InvalidRequest
from tonle.gateway.apis.responses.input_items import chat_messages, read_items
from tonle.gateway.apis.responses.request import PASSED_ON, ResponsesRequest, chat_body, read_request
from tonle.gateway.apis.responses.response_object import new_response

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def chat(**fields: Any) -> dict[str, Any]:
    request = read_request(json.dumps({"input": "Hi", **fields}).encode())
    items = read_items(request.fields.input, "msg_0_in")
    return chat_body(request, chat_messages(items))


def warned(**fields: Any) -> dict[str, str]:
    found = read_request(json.dumps({"input": "Hi", **fields}).encode()).warnings
    return {warning.param: warning.message for warning in found}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (
            {"instructions": "Be short."},
            {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]},
        ),
        ({"max_output_tokens": 7}, {"max_completion_tokens": 7}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        (
            {"text": {"verbosity": "low", "format": {"type": "json_object"}}},
            {"verbosity": "low", "response_format": {"type": "json_object"}},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        (
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
                "tool_choice": "required",
                "parallel_tool_calls": False,
            },
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        (
            {"top_k": 4, "seed": 3, "stop": ["x"], "use_cache": True},
            {"top_k": 4, "seed": 3, "stop": ["x"], "use_cache": True},
        ),
        (
            {"temperature": 0, "top_p": 0.5, "user": "u", "model": "m"},
            {"temperature": 0, "top_p": 0.5, "user": "u", "model": "m"},
        ),
    ],
)
def test_fields_become_those_of_chat(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    body = chat(**fields)
    assert {name: body[name] for name in wanted} == wanted
    assert not warned(**fields)


def test_what_asks_for_nothing_is_not_sent() -> None:
    nothing = {name: None for name in ResponsesRequest.__struct_fields__ if name != "input"}
    quiet = {
        "background": False,
        "prompt": None,
        "store": False,
        "metadata": {},
        "tools": [],
        "tool_choice": "auto",
        "include": [],
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "stream": False,
        "parallel_tool_calls": True,
    }
    for fields in ({}, nothing, quiet):
        assert chat(**fields) == {"messages": [{"role": "user", "content": "Hi"}]}
        assert not warned(**fields)


def test_only_allowed_tools_are_offered() -> None:
    tools = [TOOL, {**TOOL, "name": "g"}, {**TOOL, "name": "h"}]
    allowed = [{"type": "function", "name": "h"}, {"type": "function", "name": "f"}]
    body = chat(tools=tools, tool_choice={"type": "allowed_tools", "mode": "required", "tools": allowed})
    assert [tool["function"]["name"] for tool in body["tools"]] == ["f", "h"] and body["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"background": True}, "background cannot be served: a response is computed while its caller waits"),
        ({"prompt": {"id": "p"}}, "prompt cannot be served: this server stores no prompts"),
        (
            {"conversation": "c"},
            "conversation cannot be served: this server stores no conversations; use previous_response_id",
        ),
        (
            {"max_tokens": 5},
            "max_tokens cannot be served: it is a field of chat completions; here, use max_output_tokens",
        ),
        ({"response_format": {"type": "text"}}, "here, use text.format"),
        ({"messages": []}, "here, use input"),
        ({"input": None}, "input must be a string or a list"),
        ({"input": [7]}, r"input\[0\] must be an object"),
        (
            {"input": [{"role": "tool", "content": "x"}]},
            r"input\[0\].role must be one of user, assistant, system, developer",
        ),
        ({"input": [{"role": "user"}]}, r"input\[0\].content is missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            r"input\[0\].content\[0\] has type 'input_file', which cannot be served",
        ),
        ({"input": [{"type": "computer_call"}]}, r"input\[0\] has type 'computer_call', which cannot be served"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, r"input\[0\].call_id is missing"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, r"input\[0\].output is missing"),
        (
            {"tools": [{"type": "web_search"}]},
            r"tools\[0\]: the tool web_search cannot be served: this server runs no tools of its own",
        ),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "the tool mcp cannot be served"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "has the shape of chat completions"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name is missing"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice names 'g', which is not among tools",
        ),
        ({"tool_choice": "required"}, "tool_choice is required, but there are no tools"),
        ({"tool_choice": "always"}, "tool_choice must be none, auto, required or an object"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice: file_search cannot be served"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema is missing"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type must be one of"),
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1"),
        ({"top_logprobs": 21}, "top_logprobs must be at most 20"),
        ({"truncation": "middle"}, "truncation must be one of auto, disabled"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata has 17 pairs; at most 16 are allowed"),
        ({"metadata": {"a": "x" * 513}}, "a key may have 64 characters and a value 512"),
        ({"store": "yes"}, "store must be a boolean, not a string"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        chat(**fields)
    assert refused.value.param


def test_warnings() -> None:
    assert warned(temprature=1) == {"temprature": "unknown field, ignored"}
    assert warned(text={"tone": "kind", "format": {"type": "text", "x": 1}}, reasoning={"depth": 1}) == {
        "text.tone": "unknown field, ignored",
        "text.format.x": "unknown field, ignored",
        "reasoning.depth": "unknown field, ignored",
    }
    assert warned(reasoning={"summary": "auto"})["reasoning.summary"].startswith("accepted, has no effect")
    assert warned(include=["reasoning.encrypted_content"]) == {
        "include": "reasoning.encrypted_content: accepted, has no effect"
    }
    assert "no built-in tools" in warned(max_tool_calls=3)["max_tool_calls"]


def test_no_field_of_this_api_is_passed_on_twice() -> None:
    assert not PASSED_ON & set(ResponsesRequest.__struct_fields__)
    assert {"top_k", "seed", "stop", "chat_template_kwargs", "cache_salt", "use_cache", "speculate"} <= PASSED_ON
    assert not {"messages", "response_format", "max_tokens"} & PASSED_ON


ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    "auto",
    "\u0000",
    [],
    [None],
    [[]],
    [{}],
    [1],
    {},
    {"type": None},
    {"type": 5},
    {"type": "function"},
    {"type": "message"},
    [{"type": "message"}],
    [{"type": []}],
    [{"role": {}}],
    {"a": {"b": [1]}},
    [{"type": "message", "role": "user", "content": 5}],
    [{"role": "user", "content": [None]}],
    [{"role": "user", "content": [{}]}],
    [{"role": "assistant", "content": [{"type": "output_text", "text": 3}]}],
    [{"type": "reasoning", "summary": 3}],
    [{"type": "reasoning", "content": [{"text": None}]}],
    [{"type": "item_reference", "id": 3}],
    [{"id": []}],
    [{"type": "function_call", "call_id": {}, "name": 1, "arguments": []}],
    {"type": "allowed_tools", "tools": [3]},
    {"type": "allowed_tools", "mode": [], "tools": [{}]},
    [{"type": "function", "name": "f", "parameters": []}],
    [{"type": "function", "name": "f", "strict": "yes"}],
    {"format": 3},
    {"format": {"type": "json_schema", "schema": []}},
    {"effort": []},
    [{"role": "user", "content": [{"type": "input_image"}]}],
    [{"role": "user", "content": [{"type": ["x"]}]}],
)


def attempt(body: dict[str, Any]) -> None:
    try:
        request = read_request(json.dumps(body).encode())
        items = [item for item in read_items(request.fields.input, "msg_0_in") if item["type"] != "item_reference"]
        assert isinstance(chat_body(request, chat_messages(items)), dict)
        json.dumps(new_response(request, "resp_0", stores=True))
    except InvalidRequest as error:
        assert error.message


@pytest.mark.parametrize("name", [*ResponsesRequest.__struct_fields__, "top_k", "messages", "unknown"])
def test_a_malformed_field_is_refused_and_never_breaks(name: str) -> None:
    for value in ODD:
        attempt({"input": "Hi", "tools": [TOOL], name: value})


def test_malformed_fields_together() -> None:
    draw = random.Random(7)
    names = [*ResponsesRequest.__struct_fields__]
    for _ in range(1500):
        attempt({"input": "Hi"} | {name: draw.choice(ODD) for name in draw.sample(names, draw.randint(1, 5))})
