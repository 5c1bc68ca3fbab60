"""Wire requests into orders. What is refused is in tests/http/test_errors.py and test_completions.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.front import FakeFront
from tonle.engine.request import RequestPriority, ResolvedConfig
from tonle.errors import InvalidRequest
from tonle.protocol.openai import ChatRequest, CompletionRequest, ContentPart, Message
from tonle.replica.template_messages import template_messages
from tonle.replica.translate import EngineRequest, chat_order, completion_order

FRONT = FakeFront()


SERVED = FRONT.served(max_choices=8)


def chat(**fields: Any) -> EngineRequest:
    return chat_order(ChatRequest(messages=[Message(role="user", content="hi")], **fields), SERVED)


def complete(**fields: Any) -> EngineRequest:
    return completion_order(CompletionRequest(**fields), SERVED)


def test_bare_chat_request() -> None:
    order = chat()
    (part,) = order.parts
    assert FRONT.text.decode(part.prompt) == "<user>hi\n<assistant>"
    assert part.config == ResolvedConfig(max_length=512 - len(part.prompt)), "all else as the engine's defaults"
    assert order.n == 1 and order.priority is RequestPriority.NORMAL


@pytest.mark.parametrize("top_k", [-1, 0, None])
def test_top_k_off(top_k: int | None) -> None:
    assert chat(top_k=top_k).parts[0].config.top_k == 0


@pytest.mark.parametrize(
    ("priority", "expected"),
    [(0, "CRITICAL"), (3, "LOW"), ("critical", "CRITICAL"), ("HIGH", "HIGH"), (None, "NORMAL")],
)
def test_priority(priority: Any, expected: str) -> None:
    assert chat(priority=priority).priority is RequestPriority[expected]


def test_logprobs() -> None:
    assert chat().parts[0].config.logprobs is None
    assert chat(logprobs=False).parts[0].config.logprobs is None
    assert chat(logprobs=True).parts[0].config.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).parts[0].config.logprobs == 4
    assert complete(prompt="a", logprobs=0).parts[0].config.logprobs == 0
    assert complete(prompt="a", logprobs=3).parts[0].config.prompt_logprobs is None
    assert complete(prompt="a", logprobs=3, echo=True).parts[0].config.prompt_logprobs == 3
    assert complete(prompt="a", logprobs=3, echo=True, prompt_logprobs=5).parts[0].config.prompt_logprobs == 5


def test_parts_do_not_share_lengths() -> None:
    short, long = complete(prompt=["a", "x" * 505]).parts
    assert short.config.max_length == 16 and long.config.max_length == 6


def test_prompt_only() -> None:
    order = complete(prompt="a", echo=True, max_tokens=0)
    assert order.prompt_only and order.parts[0].config.max_length == 1
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1"):
        complete(prompt="a", max_tokens=0)


def test_content_parts_are_joined() -> None:
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    assert template_messages([Message(role="user", content=parts, name="Dara")]) == [
        {"role": "user", "content": "a\nb", "name": "Dara"}
    ]
