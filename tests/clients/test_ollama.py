"""Ollama's client against the real server and the default model: chat, generate, embed, tools, schemas, lists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import KEY, Place

ollama = pytest.importorskip("ollama", reason="ollama is not installed")
pytestmark = pytest.mark.model

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
COLD = {"temperature": 0, "num_predict": 24}


def get_weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: its name
        days: how many
    """
    return f"{city}: {days} clear days"


@pytest.fixture
def client(gateway: Place) -> Iterator[Any]:
    with ollama.Client(gateway.url.removesuffix("/v1"), headers={"authorization": f"Bearer {KEY}"}) as found:
        yield found


def test_chat_streamed_and_whole(client: Any, gateway: Place) -> None:
    whole = client.chat(f"{gateway.model}:latest", ASK, options=COLD)
    parts = list(client.chat(gateway.model, ASK, options=COLD, stream=True))
    assert whole.message.content and "".join(part.message.content for part in parts) == whole.message.content
    assert len(parts) > 2 and parts[-1].done and parts[-1].eval_count == whole.eval_count
    assert whole.prompt_eval_count and whole.total_duration and whole.eval_duration and parts[-1].eval_duration


def test_the_server_itself(places: dict[str, Place]) -> None:
    place = places["serve"]
    with ollama.Client(place.url.removesuffix("/v1")) as client:
        parts = list(client.chat(place.model, ASK, options={"num_predict": 4}, stream=True))
        assert parts[-1].done_reason == "length" and parts[-1].eval_count == 4
        assert client.show(place.model).modelinfo["transformer.context_length"] > 0


def test_generate_in_a_chat_and_raw(client: Any, gateway: Place) -> None:
    one = client.generate(gateway.model, ASK[0]["content"], options=COLD)
    assert one.response == client.chat(gateway.model, ASK, options=COLD).message.content
    raw = "".join(
        part.response
        for part in client.generate(gateway.model, "The capital of France is", raw=True, options=COLD, stream=True)
    )
    assert "Paris" in raw
    assert client.generate(gateway.model).done_reason == "load"


def test_tools(client: Any, gateway: Place) -> None:
    """The small model need not call one; what it says must be text or a call that can be made."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris for 3 days?"}]
    options = {"temperature": 0, "num_predict": 16}
    first = client.chat(gateway.model, messages, tools=[get_weather], options=options)
    for call in first.message.tool_calls or ():
        assert call.function.name == "get_weather" and isinstance(call.function.arguments, dict)
    assert first.message.content or first.message.tool_calls
    calls = [{"function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}}]
    messages += [{"role": "assistant", "content": "", "tool_calls": calls},
                 {"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris", 3)}]  # fmt: skip
    assert client.chat(gateway.model, messages, options=options).message.content


def test_a_schema_and_json(client: Any, gateway: Place) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Phnom Penh"]}}, "required": ["city"]}
    reply = client.chat(gateway.model, ASK, format=schema, options={"num_predict": 60})
    assert json.loads(reply.message.content)["city"] in ("Paris", "Phnom Penh")


def test_lists(client: Any, gateway: Place) -> None:
    assert gateway.model in [model.model for model in client.list().models]
    assert gateway.model in [model.model for model in client.ps().models]
    shown = client.show(gateway.model)
    assert shown.modelinfo["transformer.context_length"] > 0 and "tools" in shown.capabilities
    with pytest.raises(ollama.ResponseError, match="no model"):
        client.chat("llama-x", ASK)
    with pytest.raises(ollama.ResponseError, match="does not download"):
        client.pull("llama-x")
