"""`tools` and `tool_choice` of a request, as chat has them.

Does: translate function tools, refuse by name what this server does not run. Does not: look at schemas; the server that
answers does.
"""

from __future__ import annotations

from typing import Any

from tonle.errors import InvalidRequest

MODES = ("none", "auto", "required")
_NOT_RUN = "this server runs no tools of its own; offer functions that your program runs, with type function"
_FIELDS = ("description", "parameters", "strict")


def chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises `InvalidRequest`."""
    return [_chat_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]


def _chat_tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    kind = _text(tool, "type", path)
    if kind != "function":
        raise InvalidRequest(f"{path}: the tool {kind} cannot be served: {_NOT_RUN}", param=f"{path}.type")
    if "name" not in tool and isinstance(tool.get("function"), dict):
        raise InvalidRequest(
            f"{path} has the shape of chat completions; here name, description and parameters stand beside type, without "
            "an object function around them",
            param=f"{path}.function",
        )
    function: dict[str, Any] = {"name": _text(tool, "name", path)}
    for name, kinds, wanted in zip(_FIELDS, (str, dict, bool), ("a string", "an object", "a boolean"), strict=True):
        value = tool.get(name)
        if value is None:
            continue
        if not isinstance(value, kinds):
            raise InvalidRequest(f"{path}.{name} must be {wanted}", param=f"{path}.{name}")
        function[name] = value
    return {"type": "function", "function": function}


def chat_choice(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]]
) -> tuple[str | dict[str, Any] | None, list[dict[str, Any]]]:
    """`tool_choice`, and those of `tools` (chat's) that it leaves. Raises `InvalidRequest`."""
    if choice is None:
        return None, tools
    if isinstance(choice, str):
        if choice not in MODES:
            raise InvalidRequest(f"tool_choice must be {', '.join(MODES)} or an object, not {choice!r}"[:300],
                                 param="tool_choice")  # fmt: skip
        if choice == "required" and not tools:
            raise InvalidRequest("tool_choice is required, but there are no tools", param="tool_choice")
        return choice, tools
    kind = _text(choice, "type", "tool_choice")
    if kind == "allowed_tools":
        return _allowed(choice, tools)
    if kind != "function":
        raise InvalidRequest(f"tool_choice: {kind} cannot be served: {_NOT_RUN}", param="tool_choice.type")
    name = _known(choice, "tool_choice", tools)
    return {"type": "function", "function": {"name": name}}, tools


def _allowed(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Only these are offered."""
    mode, allowed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequest("tool_choice.mode must be auto or required", param="tool_choice.mode")
    if not isinstance(allowed, list) or not allowed:
        raise InvalidRequest("tool_choice.tools must be a list of tools", param="tool_choice.tools")
    names = set()
    for place, tool in enumerate(allowed):
        path = f"tool_choice.tools[{place}]"
        if not isinstance(tool, dict):
            raise InvalidRequest(f"{path} must be an object", param=path)
        names.add(_known(tool, path, tools))
    return mode, [tool for tool in tools if tool["function"]["name"] in names]


def _known(place: dict[str, Any], path: str, tools: list[dict[str, Any]]) -> str:
    name = _text(place, "name", path)
    if all(tool["function"]["name"] != name for tool in tools):
        raise InvalidRequest(f"{path} names {name!r}, which is not among tools"[:300], param=f"{path}.name")
    return name


def _text(place: dict[str, Any], name: str, path: str) -> str:
    value = place.get(name)
    if value is None:
        raise InvalidRequest(f"{path}.{name} is missing", param=f"{path}.{name}")
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{path}.{name} must be a string that is not empty", param=f"{path}.{name}")
    return value
