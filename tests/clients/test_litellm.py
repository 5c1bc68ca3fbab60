"""The SDK of litellm, with this server as an OpenAI-compatible provider."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.clients.conftest import KEY, Place
from tests.clients.weather import MAX_TOKENS, QUESTION, TOOLS, Report, check_call

litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed")
pytestmark = pytest.mark.model

# Version 1.106 imports `mcp`, which only litellm[mcp] installs, for every request with tools. This leaves that part out.
WITHOUT_MCP: dict[str, Any] = {} if find_spec("mcp") else {"_skip_mcp_handler": True}


def ask(place: Place, **fields: Any) -> Any:
    asked = {"model": f"openai/{place.model}", "messages": QUESTION, "temperature": 0, "max_tokens": MAX_TOKENS}
    at = {"api_base": place.url, "api_key": KEY, "num_retries": 0, "timeout": 240}
    return litellm.completion(**(asked | at | WITHOUT_MCP | fields))


def test_tools(place: Place) -> None:
    answer = ask(place, tools=TOOLS, tool_choice="required")
    for call in answer.choices[0].message.tool_calls:
        check_call(call.function.name, json.loads(call.function.arguments))


def test_streamed_tools(gateway: Place) -> None:
    chunks = list(ask(gateway, tools=TOOLS, tool_choice="required", stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    [call, *_] = built.choices[0].message.tool_calls
    check_call(call.function.name, json.loads(call.function.arguments))


def test_a_schema(gateway: Place) -> None:
    answer = ask(gateway, response_format=Report, temperature=1)
    assert Report.model_validate_json(answer.choices[0].message.content)


def test_a_streamed_text_is_the_whole_one(gateway: Place) -> None:
    whole = ask(gateway, max_tokens=12).choices[0].message.content
    chunks = list(ask(gateway, max_tokens=12, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
