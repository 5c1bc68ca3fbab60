"""A body of Anthropic's Messages API as a chat request.

Does: name the fields of POST /v1/messages, translate them, refuse by name what cannot be served. Does not: reply
(`reply.py`). Content blocks are translated in `blocks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from tonle.errors import InvalidRequest
from tonle.gateway.apis.chat_body import function_tool, schema_format, streamed, thinking_switch
from tonle.gateway.apis.messages.blocks import Block, ConversationMessage, chat_messages
from tonle.gateway.parsed_request import add_warning
from tonle.protocol.field_types import Integer
from tonle.protocol.fields import NO_EFFECT_MESSAGE, OtherFields, Refusal
from tonle.protocol.openai import FieldWarning, about

Effort = Literal["low", "medium", "high", "xhigh", "max"]

CACHED = {"cache_control": "prefixes are always cached"}
_STATELESS = Refusal("this server keeps no such state; send the whole conversation in messages")
_OTHER_FIELDS = OtherFields(
    refused={
        "container": Refusal("this server has no containers; send tools of your own"),
        "mcp_servers": Refusal("this server calls no MCP servers; send their tools as tools of your own", ([],)),
        "compaction": _STATELESS,
        "thread": _STATELESS,
        "inference_geo": Refusal("this server has no regions to choose from"),
    },
    no_effect={
        "context_management": "has no effect: messages are not edited",
        **dict.fromkeys(
            (
                "billing_policy",
                "diagnostics",
                "fallback_credit_token",
                "fallbacks",
                "speed",
                "user_profile_id",
                "workspace_id",
            ),
            NO_EFFECT_MESSAGE,
        ),
    },
    silent=CACHED | {"service_tier": "there is one tier"},
)


class Tool(msgspec.Struct, kw_only=True):
    other_fields: ClassVar = OtherFields(
        refused={"allowed_callers": Refusal("tools are called by the model itself", (["direct"],))},
        no_effect={
            "input_examples": "has no effect: put examples into the description",
            "defer_loading": "has no effect: the model is told of every tool",
        },
        silent=CACHED | {"eager_input_streaming": "input is streamed as it is written"},
    )
    name: str
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, about("JSON schema of the tool's input.")] = None
    type: Annotated[str | None, about("custom; a tool that Anthropic's servers run is refused.")] = None
    strict: Annotated[bool | None, about("The input must validate.")] = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, about("With type tool.")] = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[Annotated[int, Meta(ge=1)] | None, about("Most tokens of thought.")] = None
    display: Annotated[Literal["summarized", "omitted"] | None, about("omitted: leave thoughts out of the reply.")] = (
        None
    )


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    other_fields: ClassVar = OtherFields(silent={"name": "for people"})  # older clients send one
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    format: OutputFormat | None = None
    effort: Effort | None = None


class RequestMetadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What counts as input."""

    other_fields: ClassVar = _OTHER_FIELDS
    model: Annotated[str | None, about("Name of the model; may be left out if there is only one.")] = None
    messages: Annotated[list[ConversationMessage], about("The conversation, oldest first.")]
    system: Annotated[str | list[Block] | None, about("Text, or text blocks; placed first.")] = None
    tools: Annotated[list[Tool] | None, about("Tools that the model may call.")] = None
    tool_choice: Annotated[ToolChoice | None, about("auto (the default with tools), any, tool, none.")] = None
    thinking: Annotated[ThinkingConfig | None, about("Default: as the model does.")] = None
    output_config: Annotated[OutputConfig | None, about("A JSON schema for the answer; effort.")] = None
    output_format: Annotated[OutputFormat | None, about("Older form of output_config.format.")] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[Integer, about("Most new tokens, thoughts included.")]
    stop_sequences: Annotated[list[str] | None, about("End at any of these strings.")] = None
    temperature: Annotated[float | None, about("0 = always the most likely token. Default: the model's.")] = None
    top_p: Annotated[float | None, about("Keep the likeliest tokens up to this total probability.")] = None
    top_k: Annotated[Integer | None, about("Keep the k likeliest tokens.")] = None
    speculate: Annotated[
        bool | None, about("false: no speculative decoding for this request. The answer is the same. Default true.")
    ] = None
    stream: Annotated[bool | None, about("Send events as the answer is generated.")] = None
    metadata: Annotated[RequestMetadata | None, about("user_id keeps a user in one arm of an experiment.")] = None


def count_body(request: CountTokensRequest) -> dict[str, Any]:
    """For /tokenize. Raises `InvalidRequest`."""
    body = _prompt(request)
    body.pop("parallel_tool_calls", None)  # it does not change the prompt
    return body


def chat_body(request: MessagesRequest, warnings: list[FieldWarning]) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    body = _prompt(request) | {"max_tokens": request.max_tokens}
    for name in ("temperature", "top_p", "top_k", "speculate"):
        if (value := getattr(request, name)) is not None:
            body[name] = value
    if request.stop_sequences:
        body["stop"] = request.stop_sequences
    if request.metadata is not None and request.metadata.user_id:
        body["user"] = request.metadata.user_id
    if request.stream:
        body |= streamed()
    _set_output(body, request, warnings)
    if (thinking := request.thinking) is not None and thinking.budget_tokens is not None:
        body["thinking_token_budget"] = thinking.budget_tokens
    if thinking is not None and thinking.display == "omitted":
        body["include_reasoning"] = False
    return body


def _prompt(request: CountTokensRequest) -> dict[str, Any]:
    """What the model reads."""
    if not request.messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    body: dict[str, Any] = {"messages": chat_messages(request.system, request.messages)}
    if request.model:
        body["model"] = request.model
    if body["messages"][-1]["role"] == "assistant":  # the answer begins with what it says
        if "tool_calls" in body["messages"][-1]:
            raise InvalidRequest("the last message has a tool_use block: send its tool_result in a user message",
                                 param="messages")  # fmt: skip
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    _set_tools(body, request.tools or [], request.tool_choice)
    if (thinking := request.thinking) is not None and thinking.type in ("enabled", "disabled"):
        body |= thinking_switch(on=thinking.type == "enabled")
    if (effort := (request.output_config or OutputConfig()).effort) is not None and not _is_off(request.thinking):
        body["reasoning_effort"] = effort
    return body


def _is_off(thinking: ThinkingConfig | None) -> bool:
    return thinking is not None and thinking.type == "disabled"


def _set_tools(body: dict[str, Any], tools: list[Tool], choice: ToolChoice | None) -> None:
    if tools:
        body["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if choice is None:
        return
    if not tools:
        if choice.type in ("any", "tool"):
            raise InvalidRequest(f"tool_choice is {choice.type}, and there are no tools", param="tool_choice")
        return
    if choice.type == "tool":
        if choice.name not in [tool.name for tool in tools]:
            raise InvalidRequest(f"tool_choice.name must be one of {', '.join(tool.name for tool in tools)}",
                                 param="tool_choice.name")  # fmt: skip
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        body["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
    if choice.disable_parallel_tool_use:
        body["parallel_tool_calls"] = False


def _tool(tool: Tool, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{path} is {tool.type}, which only Anthropic's servers run: send tools of your own, each with an input_schema",
            param=f"{path}.type",
        )
    if tool.input_schema is None:
        raise InvalidRequest(f"{path}.input_schema is missing", param=f"{path}.input_schema")
    return function_tool(tool.name, tool.description, tool.input_schema, strict=tool.strict)


def _set_output(body: dict[str, Any], request: MessagesRequest, warnings: list[FieldWarning]) -> None:
    config = request.output_config or OutputConfig()
    if (wanted := config.format or request.output_format) is not None:
        body["response_format"] = schema_format(wanted.schema)
    if config.effort is not None and _is_off(request.thinking):
        add_warning(warnings, "output_config.effort", "has no effect with thinking disabled")
