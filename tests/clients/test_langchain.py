"""LangChain's ChatOpenAI: invoke, stream, bound tools, structured output by either method."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import KEY, Place
from tests.clients.weather import MAX_TOKENS, TOOLS, Report, check_call

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
pytestmark = pytest.mark.model

QUESTION = "How is the weather in Phnom Penh?"


@pytest.fixture
def model(gateway: Place) -> Any:
    return chat(gateway)


def chat(place: Place) -> Any:
    return langchain_openai.ChatOpenAI(
        model=place.model, base_url=place.url, api_key=KEY, temperature=0, max_tokens=MAX_TOKENS, max_retries=0,
        timeout=240,
    )  # fmt: skip


def test_invoke_and_stream_say_the_same(model: Any) -> None:
    short = model.bind(max_tokens=12)
    whole = short.invoke(QUESTION)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] <= 12
    chunks = list(short.stream(QUESTION, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0


def test_bound_tools_are_called_and_answered(place: Place) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat(place)
    bound = model.bind_tools(TOOLS, tool_choice="required")
    called = bound.invoke(QUESTION)
    assert called.tool_calls
    assert not called.invalid_tool_calls
    for call in called.tool_calls:
        check_call(call["name"], call["args"])
    results = [ToolMessage("fine", tool_call_id=call["id"]) for call in called.tool_calls]
    after = model.bind_tools(TOOLS, tool_choice="none").bind(max_tokens=8)
    assert after.invoke([HumanMessage(QUESTION), called, *results]).content


def test_streamed_calls_add_up(model: Any) -> None:
    total: Any = None
    for chunk in model.bind_tools(TOOLS, tool_choice="get_time").stream(QUESTION):
        total = chunk if total is None else total + chunk
    [call] = total.tool_calls
    assert call["name"] == "get_time"
    check_call("get_time", call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: Any, method: str) -> None:
    found = model.with_structured_output(Report, method=method, include_raw=True).invoke(QUESTION)
    assert found["parsing_error"] is None
    assert isinstance(found["parsed"], Report)
