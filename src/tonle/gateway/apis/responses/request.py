"""The body of POST /v1/responses: its fields, and the chat body they become.

Does: read and check every field, say what becomes of those that cannot be served. Does not: read items (`input_items.py`) or
find earlier responses (`context.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tonle.errors import InvalidRequest
from tonle.gateway.apis.chat_body import streamed
from tonle.gateway.apis.responses.function_tools import chat_choice, chat_tools
from tonle.gateway.parsed_request import OWN_FIELDS, add_warning
from tonle.protocol.field_types import Integer
from tonle.protocol.known import KNOWN
from tonle.protocol.openai import FieldWarning, about
from tonle.protocol.parse import decode_object, typed

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512  # of metadata


class TextFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str | None, about("Of the schema.")] = None
    schema: Annotated[dict[str, Any] | None, about("With json_schema: what the answer must match.")] = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, kw_only=True):
    format: Annotated[TextFormat | None, about("text (the default), json_object or json_schema.")] = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Struct, kw_only=True):
    effort: Annotated[str | None, about("How much to think: none, minimal, low, medium, high …")] = None
    summary: Annotated[str | None, about("No effect: thoughts are returned as they are.")] = None
    generate_summary: Annotated[str | None, about("Older name of summary.")] = None


class ResponsesRequest(Struct, kw_only=True):
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
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
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
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    stream_options: Annotated[dict[str, Any] | None, about("No effect.")] = None
    background: Annotated[bool | None, about("Only false.")] = None
    prompt: Annotated[Any, about("Not served: stored prompts.")] = None
    conversation: Annotated[Any, about("Not served: use previous_response_id.")] = None


# They would change the answer, or what the caller expects of it.
_REFUSED = {
    "background": "a response is computed while its caller waits; leave it out, or set stream",
    "prompt": "this server stores no prompts; send instructions and input",
    "conversation": "this server stores no conversations; use previous_response_id",
    "previous_input_messages": "use previous_response_id, or send the whole conversation as input",
}
# Names of chat's for what this API has under another.
_ELSEWHERE = {
    "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format", "reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity",
    "functions": "tools", "function_call": "tool_choice", "logprobs": "top_logprobs",
}  # fmt: skip
_NOT_HERE = ("enable_response_messages",)
_OWN = frozenset(ResponsesRequest.__struct_fields__)
# Sampling fields and others that chat has too: passed on as they are. Which of them count, the server that answers says.
PASSED_ON = frozenset(KNOWN[PATH]) - _OWN - {*_REFUSED, *_ELSEWHERE, *_NOT_HERE} | {*OWN_FIELDS}
_SAME = ("model", "temperature", "top_p", "user", "safety_identifier", "prompt_cache_key", "service_tier")


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
    for name, why in _REFUSED.items():
        if raw.get(name):
            raise InvalidRequest(f"{name} cannot be served: {why}", param=name)
    for name, ours in _ELSEWHERE.items():
        if raw.get(name) is not None:
            raise InvalidRequest(f"{name} is a field of chat completions; here, use {ours}", param=name)
    own = {name: value for name, value in raw.items() if name in _OWN}
    warnings: list[FieldWarning] = []
    for name, value in raw.items():
        if name not in _OWN and name not in PASSED_ON and value is not None:
            add_warning(warnings, name, "accepted, has no effect" if name in _NOT_HERE else "unknown field, ignored")
    fields = typed(own, ResponsesRequest)
    _check_metadata(fields.metadata or {})
    _note_unused(raw, fields, warnings)
    return ReadRequest(fields, {name: value for name, value in raw.items() if name in PASSED_ON}, warnings)


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_PAIRS:
        raise InvalidRequest(f"metadata has {len(metadata)} pairs; at most {MAX_PAIRS} are allowed", param="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            raise InvalidRequest(
                f"metadata: a key may have {MAX_KEY_CHARS} characters and a value {MAX_VALUE_CHARS}", param="metadata"
            )


def _note_unused(raw: dict[str, Any], fields: ResponsesRequest, warnings: list[FieldWarning]) -> None:
    reasoning, text = fields.reasoning, fields.text
    inside = (("text", text), ("text.format", None if text is None else text.format), ("reasoning", reasoning))
    for path, typed_part in inside:
        part: Any = raw
        for name in path.split("."):
            part = part.get(name) if isinstance(part, dict) else None
        if typed_part is not None and isinstance(part, dict):
            for name in part.keys() - set(typed_part.__struct_fields__):
                add_warning(warnings, f"{path}.{name}", "unknown field, ignored")
    if reasoning is not None and (reasoning.summary or reasoning.generate_summary):
        add_warning(warnings, "reasoning.summary", "accepted, has no effect: thoughts are returned as they are")
    for name in fields.include or ():
        if name != LOGPROBS:
            add_warning(warnings, "include", f"{name}: accepted, has no effect")
    if fields.max_tool_calls is not None:
        add_warning(warnings, "max_tool_calls", "accepted, has no effect: there are no built-in tools to call")
    if (fields.stream_options or {}).get("include_obfuscation"):
        add_warning(warnings, "stream_options.include_obfuscation", "accepted, has no effect")


def chat_body(request: ReadRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    fields = request.fields
    if fields.instructions is not None:
        messages = [{"role": "system", "content": fields.instructions}, *messages]
    body: dict[str, Any] = {"messages": messages, **request.passed_on}
    for name in _SAME:
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
