"""Tools on the wire: what a caller offers, what it wants called, and the calls of earlier messages and of answers.

Does: name the fields, with their types. Does not: check names or schemas (`replica/read_tools.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType

from tonle.protocol.field_types import about

# -- in requests


class FunctionDefinition(Struct, kw_only=True):
    name: Annotated[str, about("Letters, digits, _ and -, at most 64.")]
    description: Annotated[str | None, about("For the model: what it does, and when to call it.")] = None
    parameters: Annotated[dict[str, Any] | None, about("A JSON schema of an object. Default: any object.")] = None
    strict: Annotated[
        bool | None, about("Hold the arguments to the schema, also where the model may choose to call. Default no.")
    ] = None


class ToolDefinition(Struct, kw_only=True):
    type: Annotated[str, about("Only function.")] = "function"
    function: FunctionDefinition | None = None


class FunctionName(Struct, kw_only=True):
    name: str


class AllowedTool(Struct, kw_only=True):
    type: str = "function"
    function: FunctionName | None = None


class AllowedTools(Struct, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    tools: list[AllowedTool]


class ToolChoiceObject(Struct, kw_only=True):
    type: Annotated[Literal["function", "allowed_tools"], about("What the other field is.")] = "function"
    function: Annotated[FunctionName | None, about("The one tool to call.")] = None
    allowed_tools: Annotated[AllowedTools | None, about("Those that may be called.")] = None


class SentFunction(Struct, kw_only=True):
    """Of a call that an assistant made earlier."""

    name: str
    arguments: Annotated[str | dict[str, Any] | None, about("JSON in a string.")] = None


class SentCall(Struct, kw_only=True):
    function: SentFunction
    id: Annotated[str | None, about("What tool_call_id of the tool's message names.")] = None
    type: Annotated[str | None, about("Only function.")] = None


# -- in replies


class CalledFunction(Struct):
    name: str | UnsetType = UNSET
    arguments: Annotated[str | UnsetType, about("JSON in a string; in a stream, a piece of it.")] = UNSET


class WireCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CallDelta(Struct, kw_only=True):
    """The first one of a call has its id and name; the others a piece of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction
