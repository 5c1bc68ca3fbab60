"""The body of POST /v1/responses: its fields, and the chat body they become.

Does: read and check every field, say what becomes of those that cannot be served. Does not: read items (`input_items.py`) or
find earlier responses (`context.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from tonle.errors import InvalidRequest
from tonle.gateway.apis.chat_body import streamed
from tonle.gateway.apis.responses.function_tools import chat_choice, chat_tools
from tonle.gateway.parsed_request import OWN_FIELDS, add_warning
from tonle.protocol.field_types import Integer
from tonle.protocol.fields import NO_EFFECT_MESSAGE, OtherFields, Refusal
from tonle.protocol.known import KNOWN
from tonle.protocol.openai import FieldWarning, about
from tonle.protocol.parse import decode_object, typed, unused

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512  # of metadata

# Names of chat's for what this API has under another.
_ELSEWHERE = {
    "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format", "reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity",
    "functions": "tools", "function_call": "tool_choice", "logprobs": "top_logprobs",
}  # fmt: skip
_OTHER_FIELDS = OtherFields(
    refused={
        "background": Refusal("a response is computed while its caller waits; leave it out, or set stream", (False,)),
        "prompt": Refusal("this server stores no prompts; send instructions and input"),
        "conversation": Refusal("this server stores no conversations; use previous_response_id"),
        "previous_input_messages": Refusal("use previous_response_id, or send the whole conversation as input"),
        "n": Refusal("a response has one answer", (1,)),
        "context_management": Refusal("this server does not compact a conversation; use truncation", ([],)),
        **{name: Refusal(f"it is a field of chat completions; here, use {ours}") for name, ours in _ELSEWHERE.items()},
    },
    no_effect={
        "enable_response_messages": NO_EFFECT_MESSAGE,
        "stream_options": "has no effect: the last event always has the usage",
    },
)
# Of fields below that have no effect, though they are returned or may be sent.
UNUSED = {
    "max_tool_calls": "accepted, has no effect: there are no built-in tools to call",
    "reasoning.summary": "accepted, has no effect: thoughts are returned as they are",
    "reasoning.generate_summary": "accepted, has no effect: thoughts are returned as they are",
}


class TextFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str | None, about("Of the schema.")] = None
    schema: Annotated[dict[str, Any] | None, about("With json_schema: what the answer must match.")] = None
    strict: Annotated[bool | None, about("Passed on; Tonle's own engine always enforces the schema.")] = None
    description: Annotated[str | None, about("For people.")] = None


class TextConfig(Struct, kw_only=True):
    format: Annotated[TextFormat | None, about("text (the default), json_object or json_schema.")] = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, about("Passed on; Tonle's own engine takes medium only.")
    ] = None


class ReasoningConfig(Struct, kw_only=True):
    other_fields: ClassVar = OtherFields(
        no_effect={
            "context": "has no effect: the model sees thoughts since the user's last message",
            "mode": NO_EFFECT_MESSAGE,
        }
    )
    effort: Annotated[str | None, about("How much to think: none, minimal, low, medium, high …")] = None
    summary: Annotated[str | None, about("No effect: thoughts are returned as they are.")] = None
    generate_summary: Annotated[str | None, about("Older name of summary.")] = None


class ResponsesRequest(Struct, kw_only=True):
    other_fields: ClassVar = _OTHER_FIELDS
    input: Annotated[str | list[Any], about("Text, or a list of items: messages, function calls and their outputs.")]
    model: Annotated[str | None, about("Name of the model; may be left out if there is only one.")] = None
    instructions: Annotated[str | None, about("A system message before all others; of this request only.")] = None
    previous_response_id: Annotated[str | None, about("Continue the conversation of a stored response.")] = None
    store: Annotated[bool | None, about("Keep the response. Default true.")] = None
    stream: Annotated[bool | None, about("Send events as the answer is generated.")] = None
    tools: Annotated[list[dict[str, Any]] | None, about("Functions that the model may call.")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, about("auto, none, required, one function, or allowed_tools.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, about("Whether one answer may call several functions.")] = None
    max_tool_calls: Annotated[Integer | None, about("Of built-in tools, which there are none of: no effect.")] = None
    text: Annotated[TextConfig | None, about("format: what the answer must be; verbosity.")] = None
    reasoning: Annotated[ReasoningConfig | None, about("effort: how much to think.")] = None
    max_output_tokens: Annotated[Annotated[int, Meta(ge=1, le=2**31 - 1)] | None, about("Most new tokens.")] = None
    temperature: Annotated[float | None, about("0 = always the most likely token. Default: the model's, else 1.")] = (
        None
    )
    top_p: Annotated[float | None, about("Keep the likeliest tokens up to this total probability.")] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None, about("Return log-probabilities, with this many alternatives.")
    ] = None
    include: Annotated[list[str] | None, about(f"{LOGPROBS} asks for log-probabilities; others have no effect.")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, about("auto: leave out the oldest turns if the context is too long.")
    ] = None
    metadata: Annotated[dict[str, str] | None, about("Up to 16 pairs of texts; returned as they are.")] = None
    user: Annotated[str | None, about("Who asks; keeps a user in one arm of an experiment.")] = None
    safety_identifier: Annotated[str | None, about("Returned, and passed on.")] = None
    prompt_cache_key: Annotated[str | None, about("Returned, and passed on.")] = None
    service_tier: Annotated[str | None, about("Passed on.")] = None


_OWN = frozenset(ResponsesRequest.__struct_fields__)
# Sampling fields and others that chat has too: passed on as they are. Which of them count, the server that answers says.
PASSED_ON = frozenset(KNOWN[PATH]) - _OWN - {*_OTHER_FIELDS.refused, *_OTHER_FIELDS.no_effect} | {*OWN_FIELDS}
SAME = ("model", "temperature", "top_p", "user", "safety_identifier", "prompt_cache_key", "service_tier")


class ReadRequest(Struct):
    """A request that was read: its fields, those to pass on, and what the caller is told of others."""

    fields: ResponsesRequest
    passed_on: dict[str, Any]
    warnings: list[FieldWarning]

    @property
    def stores(self) -> bool:
        return self.fields.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return self.fields.top_logprobs is not None or LOGPROBS in (self.fields.include or ())


def read_request(body: bytes) -> ReadRequest:
    """Raises `InvalidRequest`."""
    raw = decode_object(body)
    passed_on = {name: value for name, value in raw.items() if name in PASSED_ON}
    own = {name: value for name, value in raw.items() if name not in PASSED_ON}
    fields = typed(own, ResponsesRequest)
    warnings = unused(own, fields)
    _check_metadata(fields.metadata or {})
    _note_unused(fields, warnings)
    return ReadRequest(fields, passed_on, warnings)


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_PAIRS:
        raise InvalidRequest(f"metadata has {len(metadata)} pairs; at most {MAX_PAIRS} are allowed", param="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            raise InvalidRequest(
                f"metadata: a key may have {MAX_KEY_CHARS} characters and a value {MAX_VALUE_CHARS}", param="metadata"
            )


def _note_unused(fields: ResponsesRequest, warnings: list[FieldWarning]) -> None:
    reasoning = fields.reasoning or ReasoningConfig()
    given = {
        "max_tool_calls": fields.max_tool_calls is not None,
        "reasoning.summary": reasoning.summary is not None,
        "reasoning.generate_summary": reasoning.generate_summary is not None,
    }
    for name, why in UNUSED.items():
        if given[name]:
            add_warning(warnings, name, why)
    for name in fields.include or ():
        if name != LOGPROBS:
            add_warning(warnings, "include", f"{name}: {NO_EFFECT_MESSAGE}")


def chat_body(request: ReadRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    fields = request.fields
    if fields.instructions is not None:
        messages = [{"role": "system", "content": fields.instructions}, *messages]
    body: dict[str, Any] = {"messages": messages, **request.passed_on}
    for name in SAME:
        if (value := getattr(fields, name)) is not None:
            body[name] = value
    if fields.max_output_tokens is not None:
        body["max_completion_tokens"] = fields.max_output_tokens
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        body["reasoning_effort"] = fields.reasoning.effort
    if fields.text is not None:
        if fields.text.verbosity is not None:
            body["verbosity"] = fields.text.verbosity
        if fields.text.format is not None and (wanted := _response_format(fields.text.format)) is not None:
            body["response_format"] = wanted
    tools = chat_tools(fields.tools or [])
    choice, offered = chat_choice(fields.tool_choice, tools)
    if offered:
        body["tools"] = offered
        if choice is not None:
            body["tool_choice"] = choice
        if fields.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = fields.parallel_tool_calls
    if request.wants_logprobs:
        body |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    if fields.stream:
        body |= streamed()
    return body


def _response_format(wanted: TextFormat) -> dict[str, Any] | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.schema is None:
        raise InvalidRequest("text.format.schema is missing", param="text.format.schema")
    if not wanted.name:
        raise InvalidRequest("text.format.name is missing", param="text.format.name")
    given = {"name": wanted.name, "schema": wanted.schema, "strict": wanted.strict, "description": wanted.description}
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if value is not None}}
