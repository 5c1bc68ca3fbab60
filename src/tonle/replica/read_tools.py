"""The tools of a request, from the wire into what chat formats and templates read.

Does: check names, schemas and what is to be called, in the caller's words; take the older `functions` for tools. Does not:
render or parse calls (`tonle.chat_formats`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tonle.chat_formats.chat_format import Tool, ToolChoice
from tonle.errors import InvalidRequest
from tonle.protocol.openai import ChatRequest
from tonle.protocol.tool_fields import AllowedTools, FunctionDefinition, FunctionName, ToolChoiceObject, ToolDefinition

MAX_TOOLS = 128  # as in OpenAI's API
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call."""

    tools: list[Tool]
    choice: ToolChoice
    as_function_call: bool = False  # the caller speaks the older form
    paths: Mapping[str, str] = field(
        default_factory=dict, compare=False
    )  # of each tool's function in the body, by name

    @property
    def param(self) -> str:
        return "functions" if self.as_function_call else "tools"


def read_tools(request: ChatRequest) -> ToolUse | None:
    """None: no tool may be called. Raises `InvalidRequest`."""
    use = _read(request)
    if use is None:
        return None
    paths = {each.name: f"functions[{index}]" for index, each in enumerate(request.functions or ())}
    for index, definition in enumerate(request.tools or ()):
        if definition.function is not None:
            paths[definition.function.name] = f"tools[{index}].function"
    return replace(use, paths=paths)


def _read(request: ChatRequest) -> ToolUse | None:
    if request.functions is not None or request.function_call is not None:
        return _read_functions(request)
    tools, choice = tools_of(request.tools or []), request.tool_choice
    parallel = request.parallel_tool_calls is not False
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools: there is nothing to call", param="tool_choice")
        return None
    if choice == "none":
        return None
    if choice is None or choice == "auto":
        return ToolUse(tools, ToolChoice(parallel=parallel))
    if choice == "required":
        return ToolUse(tools, ToolChoice(must_call=True, parallel=parallel))
    if isinstance(choice, str):
        raise InvalidRequest(
            f"tool_choice must be one of {', '.join(_CHOICES)}, or an object that names a tool, not {choice[:100]!r}",
            param="tool_choice",
        )
    return _read_choice(choice, tools, parallel)


def tools_of(definitions: list[ToolDefinition], name: str = "tools") -> list[Tool]:
    """Raises `InvalidRequest`."""
    functions = []
    for index, definition in enumerate(definitions):
        path = f"{name}[{index}]"
        if definition.type != "function":
            raise InvalidRequest(
                f"{path}.type must be function, not {definition.type[:100]!r}: the server runs no tools itself",
                param=f"{path}.type",
            )
        if definition.function is None:
            raise InvalidRequest(f"{path}.function is missing", param=f"{path}.function")
        functions.append((f"{path}.function", definition.function))
    return _checked(functions, name)


def template_tool(tool: Tool) -> dict[str, Any]:
    """As templates read it: OpenAI's form, without what is the server's alone."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _read_functions(request: ChatRequest) -> ToolUse | None:
    """OpenAI's older form of the same."""
    if request.tools or request.tool_choice is not None:
        raise InvalidRequest("functions is the older form of tools: send one of them", param="functions")
    functions = [(f"functions[{index}]", function) for index, function in enumerate(request.functions or [])]
    tools, choice = _checked(functions, "functions"), request.function_call
    if isinstance(choice, FunctionName):
        return _named(choice.name, tools, "function_call.name", as_function_call=True)
    if choice not in (None, "none", "auto"):
        raise InvalidRequest(
            f"function_call must be one of none, auto, or an object with a name, not {str(choice)[:100]!r}",
            param="function_call",
        )
    if choice == "none" or not tools:
        return None
    return ToolUse(tools, ToolChoice(parallel=False), as_function_call=True)


def _checked(functions: Sequence[tuple[str, FunctionDefinition]], name: str) -> list[Tool]:
    """`functions`: each with its path in the body."""
    if len(functions) > MAX_TOOLS:
        raise InvalidRequest(f"{name} takes at most {MAX_TOOLS}, not {len(functions)}", param=name)
    tools: dict[str, Tool] = {}
    for path, function in functions:
        if not _NAME.fullmatch(function.name):
            raise InvalidRequest(
                f"{path}.name must have 1 to 64 letters, digits, _ or -, not {function.name[:100]!r}",
                param=f"{path}.name",
            )
        if function.name in tools:
            raise InvalidRequest(f"{path}.name: there is another one named {function.name}", param=f"{path}.name")
        schema = function.parameters or {}
        if schema.get("type", "object") != "object":
            raise InvalidRequest(
                f"{path}.parameters must be the JSON schema of an object: its type must be object, not "
                f"{str(schema['type'])[:100]!r}", param=f"{path}.parameters",
            )  # fmt: skip
        tools[function.name] = Tool(function.name, function.description or "", schema, bool(function.strict))
    return list(tools.values())


def _read_choice(choice: ToolChoiceObject, tools: list[Tool], parallel: bool) -> ToolUse:
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise InvalidRequest("tool_choice.allowed_tools is missing", param="tool_choice.allowed_tools")
        return _allowed(choice.allowed_tools, tools, parallel)
    if choice.function is None:
        raise InvalidRequest("tool_choice.function is missing", param="tool_choice.function")
    return _named(choice.function.name, tools, "tool_choice.function.name")


def _named(name: str, tools: list[Tool], path: str, *, as_function_call: bool = False) -> ToolUse:
    _find(name, tools, path)
    return ToolUse(tools, ToolChoice(must_call=True, name=name, parallel=False), as_function_call)


def _allowed(allowed: AllowedTools, tools: list[Tool], parallel: bool) -> ToolUse:
    """The model gets to see these alone."""
    path = "tool_choice.allowed_tools.tools"
    if not allowed.tools:
        raise InvalidRequest(f"{path} is empty; for no tool at all send tool_choice: none", param=path)
    found: list[Tool] = []
    for index, each in enumerate(allowed.tools):
        if each.type != "function" or each.function is None:
            raise InvalidRequest(f"{path}[{index}].function is missing", param=f"{path}[{index}].function")
        found.append(_find(each.function.name, tools, f"{path}[{index}].function.name"))
    return ToolUse(found, ToolChoice(must_call=allowed.mode == "required", parallel=parallel))


def _find(name: str, tools: list[Tool], path: str) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    known = ", ".join(tool.name for tool in tools) or "none"
    raise InvalidRequest(f"{path}: there is no tool {name[:100]!r}; there are {known[:1000]}", param=path)
