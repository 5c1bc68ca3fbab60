"""Grammars of calls, in Lark as llguidance reads it.

Does: the pieces of which the formats put their grammars together. Does not: compile them.

JSON is bound to one way of writing: `, ` and `: `, on one line. Then most of a call is no choice, and a small model cannot fill
an answer with blanks. An object holds what its schema names and no more, unless the schema allows more in so many words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tonle.chat_formats.chat_format import Tool, ToolChoice
from tonle.errors import InvalidRequest

MAX_CALLS = 8  # in an answer of calls alone
ANY_TEXT = "TEXT: /(.|\\n)*/"
LEAD = "LEAD: /\\n{0,2}/"  # between a thought and what follows it
_WRITING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_COMBINED = {"$ref", "$dynamicRef", "anyOf", "oneOf", "not", "if", "patternProperties", "unevaluatedProperties"}


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """For use inside of a regular expression."""
    return re.escape(text).replace("/", r"\/")


def tag(text: str, special_tokens: Mapping[str, int]) -> str:
    """As its token, if it is a special one: text cannot become that."""
    token = special_tokens.get(text)
    return literal(text) if token is None else f"<[{token}]>"


def arguments(tool: Tool, *, is_bound: bool = True) -> str:
    """Of a call of this tool: what its schema says, or any object."""
    schema = tool.parameters if is_bound else {}
    if "allOf" not in json.dumps(schema):  # what one of its parts does not name, another may
        schema = _closed(schema)
    return json_value({"type": "object", **schema})


def json_value(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _WRITING}, ensure_ascii=False)


def _closed(schema: Any) -> Any:
    """The same schema, but without properties that it does not name."""
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            closed[key] = {name: _closed(value) for name, value in schema[key].items()}
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    named, required = schema.get("properties"), schema.get("required", [])
    if isinstance(named, dict) and not _COMBINED & schema.keys() and all(name in named for name in required):
        closed.setdefault("additionalProperties", False)
    return closed


def called_tools(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
    """Those that an answer may call. Raises `InvalidRequest` if the one that is named is none of them."""
    if choice.name is None:
        return tools
    named = [tool for tool in tools if tool.name == choice.name]
    if not named:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidRequest(f"tool_choice names {choice.name!r:.80}, which is not among the tools ({known:.200})")
    return named


def most_calls(choice: ToolChoice) -> int:
    """In an answer of calls alone."""
    return MAX_CALLS if choice.parallel and choice.name is None else 1


def repeated(rule: str, separator: str, most: int) -> str:
    """One or more, at most so many, of what this rule says."""
    return rule if most == 1 else f"{rule} ({separator} {rule}){{0,{most - 1}}}"


def one_of(rule: str, cases: Sequence[str]) -> str:
    """A rule with a rule for each case."""
    names = [f"{rule}_{number}" for number in range(len(cases))]
    return "\n".join([f"{rule}: {' | '.join(names)}", *map("{}: {}".format, names, cases)])


def text_with_calls(trigger: str, special_tokens: Mapping[str, int], choice: ToolChoice) -> str:
    """Rules: any text in which `trigger` is followed by what the rule `call` says; one call at most if no more are wanted."""
    is_special = trigger in special_tokens
    start = "(before call)* TEXT" if choice.parallel else "TEXT | before call LEAD"
    return "\n".join([
        f"start: {start}",
        f"before{'' if is_special else '[lazy]'}: TEXT {tag(trigger, special_tokens)}",
        ANY_TEXT,
        LEAD,
    ])  # fmt: skip
