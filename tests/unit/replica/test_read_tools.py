"""Tools on the wire into tools of a format, and what is wrong with them in the caller's words."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from tonle.chat_formats.chat_format import Tool, ToolChoice
from tonle.errors import InvalidRequest
from tonle.protocol.openai import ChatRequest
from tonle.protocol.parse import parse
from tonle.replica.read_tools import MAX_TOOLS, ToolUse, read_tools, template_tool

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def read(**fields: Any) -> ToolUse | None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return read_tools(parse(msgspec.json.encode(body), ChatRequest)[0])


TWO = [tool("weather", description="The weather.", strict=True), tool("time")]
READ = [Tool("weather", "The weather.", SCHEMA, strict=True), Tool("time", "", SCHEMA)]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("required", ToolChoice(must_call=True)),
        (named("time"), ToolChoice(must_call=True, name="time", parallel=False)),
    ],
)
def test_choices(choice: Any, expected: ToolChoice) -> None:
    assert read(tools=TWO, tool_choice=choice) == ToolUse(READ, expected)


def test_one_call_at_a_time() -> None:
    for choice in ("auto", "required"):
        use = read(tools=TWO, tool_choice=choice, parallel_tool_calls=False)
        assert use is not None and not use.choice.parallel


def test_nothing_to_call() -> None:
    for fields in ({}, {"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tools": TWO, "tool_choice": "none"},
                   {"tool_choice": "none"}, {"functions": []}, {"functions": [TWO[0]["function"]], "function_call": "none"},
                   {"parallel_tool_calls": True}):  # fmt: skip
        assert read(**fields) is None, fields


def test_allowed_tools_are_the_only_ones() -> None:
    def allowed(mode: str) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named("time")]}}

    assert read(tools=TWO, tool_choice=allowed("auto")) == ToolUse(READ[1:], ToolChoice())
    assert read(tools=TWO, tool_choice=allowed("required")) == ToolUse(READ[1:], ToolChoice(must_call=True))


def test_the_older_form() -> None:
    functions = [each["function"] for each in TWO]
    use = read(functions=functions)
    assert use == ToolUse(READ, ToolChoice(parallel=False), as_function_call=True)
    assert read(functions=functions, function_call="auto") == use
    choice = ToolChoice(must_call=True, name="time", parallel=False)
    assert read(functions=functions, function_call={"name": "time"}) == ToolUse(READ, choice, as_function_call=True)


def test_what_templates_see() -> None:
    assert [template_tool(each) for each in READ] == [
        {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "time", "parameters": SCHEMA}},
    ]
    assert template_tool(Tool("f"))["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [tool("a"), {"type": "custom"}]}, "tools[1].type", "must be function, not 'custom'"),
        ({"tools": [tool("")]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "not 'a b'"),
        ({"tools": [tool("ខ")]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [tool("a" * 65)]}, "tools[0].function.name", "1 to 64"),
        ({"tools": [tool("a\n")]}, "tools[0].function.name", "letters"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name", "another one named a"),
        ({"tools": [tool("a", parameters={"type": "string"})]}, "tools[0].function.parameters", "not 'string'"),
        ({"tools": [tool("a", parameters=[])]}, "tools[0].function.parameters", "must be an object, not a list"),
        ({"tools": [tool("a", strict="yes")]}, "tools[0].function.strict", "must be a boolean"),
        ({"tools": [tool(f"a{i}") for i in range(MAX_TOOLS + 1)]}, "tools", "at most 128, not 129"),
        ({"tools": {}}, "tools", "must be a list"),
        ({"tools": [tool("a")], "tool_choice": "any"}, "tool_choice", "none, auto, required"),
        ({"tools": [tool("a")], "tool_choice": named("b")}, "tool_choice.function.name", "no tool 'b'; there are a"),
        ({"tools": [tool("a")], "tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
        ({"tools": [tool("a")], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "must be one of"),
        ({"tools": [tool("a")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "is missing"),
        (
            {"tools": [tool("a")], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}},
            "tool_choice.allowed_tools.tools", "is empty",
        ),
        ({"tool_choice": named("a")}, "tool_choice", "needs tools"),
        ({"tools": [tool("a")], "functions": [{"name": "a"}]}, "functions", "older form of tools"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name", "letters"),
        ({"functions": [{"name": "a"}], "function_call": "required"}, "function_call", "none, auto"),
        ({"function_call": {"name": "a"}}, "function_call.name", "no tool 'a'; there are none"),
    ],
)  # fmt: skip
def test_refusals(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as refusal:
        read(**fields)
    assert refusal.value.param == param
