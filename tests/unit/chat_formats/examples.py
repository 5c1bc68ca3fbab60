"""What the tests of chat formats share: tools, answers as models write them, and what was read of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tonle.chat_formats import ChatFormat, ThinkingTags, Tool, find_format
from tonle.chat_formats.find import FORMATS
from tonle.chat_formats.parts import CallArguments, CallBegins, ContentText, Part, ReasoningText

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
}
TOOLS = [Tool("get_weather", "The weather in a city", WEATHER), Tool("now")]
STRICT = [Tool("get_weather", "The weather in a city", WEATHER, strict=True), Tool("now")]

# Formats, with the template that makes them write as they do. The tags are text here.
VARIANTS = {
    **{name: (name, "") for name in FORMATS},
    "mistral-new": ("mistral", "[ARGS]"),
    "phi4-functools": ("phi4", "functools["),
    "granite": ("phi4", "<|tool_call|>"),
}
# Of those whose arguments are JSON: what their models write is what their grammars ask for.
JSON_VARIANTS = [name for name in VARIANTS if name not in ("qwen3_coder", "pythonic", "functiongemma")]


def variant(name: str, special_tokens: dict[str, int] | None = None) -> ChatFormat:
    kind, template = VARIANTS[name]
    return find_format(template, kind, special_tokens=special_tokens)


def read(
    chat_format: ChatFormat, pieces: str | Iterable[str], tools: list[Tool] = TOOLS,
    thinking: ThinkingTags | None = None, *, is_open: bool = False,
) -> list[Part]:  # fmt: skip
    """The parts of an answer that comes in these pieces."""
    parser = chat_format.parser(tools, thinking=thinking, is_open=is_open)
    parts = [part for piece in ([pieces] if isinstance(pieces, str) else pieces) for part in parser.push(piece)]
    return parts + parser.finish()


def joined(parts: list[Part]) -> list[tuple[str, Any]]:
    """Neighbours of one kind as one: ("text", …), ("thought", …), ("call", [name, arguments])."""
    found: list[tuple[str, Any]] = []
    num_calls = 0
    for part in parts:
        match part:
            case CallBegins(index, name):
                assert index == num_calls
                num_calls += 1
                found.append(("call", [name, ""]))
            case CallArguments(index, text):
                assert index == num_calls - 1
                assert found[-1][0] == "call"
                found[-1][1][1] += text
            case ContentText(text) | ReasoningText(text):
                assert text
                kind = "text" if isinstance(part, ContentText) else "thought"
                if found and found[-1][0] == kind:
                    found[-1] = (kind, found[-1][1] + text)
                else:
                    found.append((kind, text))
    return found
