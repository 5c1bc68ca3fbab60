"""Every parameter of the clients that people use is in a table of docs/compatibility.md."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from tests.house.compatibility_table import REQUESTS, inside, other_fields, rows
from tonle.gateway.apis.messages.blocks import Block
from tonle.gateway.apis.messages.request import (
    OutputConfig,
    OutputFormat,
    RequestMetadata,
    ThinkingConfig,
    Tool,
    ToolChoice,
)
from tonle.gateway.apis.ollama.options import Options
from tonle.gateway.apis.responses.request import ReasoningConfig, TextConfig
from tonle.protocol.openai import StreamOptions

# What a method's caller tells the client, not the server.
_OF_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout", "betas", "text_format"}

METHODS = {
    "openai.resources.chat.completions:Completions.create": "/v1/chat/completions",
    "openai.resources.chat.completions:Completions.parse": "/v1/chat/completions",
    "openai.resources.completions:Completions.create": "/v1/completions",
    "openai.resources.responses:Responses.create": "/v1/responses",
    "openai.resources.responses:Responses.parse": "/v1/responses",
    "openai.resources.embeddings:Embeddings.create": "/v1/embeddings",
    "anthropic.resources.messages:Messages.create": "/v1/messages",
    "anthropic.resources.messages:Messages.stream": "/v1/messages",
    "anthropic.resources.messages:Messages.count_tokens": "/v1/messages/count_tokens",
    "anthropic.resources.beta.messages:Messages.create": "/v1/messages",
    "ollama:Client.chat": "/api/chat",
    "ollama:Client.generate": "/api/generate",
    "ollama:Client.embed": "/api/embed",
    "ollama:Client.embeddings": "/api/embeddings",
}
# Types of fields inside others -> ours.
PARTS = {
    "openai.types.chat:ChatCompletionStreamOptionsParam": StreamOptions,
    "openai.types.shared_params.reasoning:Reasoning": ReasoningConfig,
    "openai.types.responses:ResponseTextConfigParam": TextConfig,
    "anthropic.types:ToolParam": Tool,
    "anthropic.types:ToolChoiceAutoParam": ToolChoice,
    "anthropic.types:ToolChoiceToolParam": ToolChoice,
    "anthropic.types:ThinkingConfigEnabledParam": ThinkingConfig,
    "anthropic.types:ThinkingConfigAdaptiveParam": ThinkingConfig,
    "anthropic.types:OutputConfigParam": OutputConfig,
    "anthropic.types:JSONOutputFormatParam": OutputFormat,
    "anthropic.types:MetadataParam": RequestMetadata,
    "anthropic.types:TextBlockParam": Block,
    "anthropic.types:ToolUseBlockParam": Block,
    "anthropic.types:ToolResultBlockParam": Block,
    "anthropic.types:ThinkingBlockParam": Block,
    "ollama:Options": Options,
}


def _found(place: str) -> Any:
    module, _, names = place.partition(":")
    client = module.split(".")[0]
    pytest.importorskip(client, reason=f"the client {client} is not installed: its parameters were not compared")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("place", METHODS)
def test_every_parameter_is_in_a_table(place: str) -> None:
    path = METHODS[place]
    parameters = set(inspect.signature(_found(place)).parameters) - _OF_CLIENT
    assert len(parameters) > 2
    assert not parameters - rows(path).keys(), (
        f"say what becomes of them at {path}: a field of {REQUESTS[path].__name__}, or its other_fields"
    )


@pytest.mark.parametrize("place", PARTS)
def test_so_is_every_field_inside_others(place: str) -> None:
    ours, own = PARTS[place], other_fields(PARTS[place])
    theirs = _found(place)
    names = set(getattr(theirs, "model_fields", None) or theirs.__annotations__)
    known = {*ours.__struct_fields__, *own.refused, *own.no_effect, *own.silent}
    assert names and not names - known, f"say what becomes of them: a field of {ours.__name__}, or its other_fields"


def test_fields_inside_others_are_found_at_every_depth() -> None:
    names = {name for name, _ in inside(REQUESTS["/v1/messages"])}
    assert {"tools[].cache_control", "messages[].content[].signature", "output_config.format.name"} <= names
