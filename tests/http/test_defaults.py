"""Defaults of requests over HTTP: the model's, the server's, and how a caller learns of them."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes.front import FakeFront
from tonle.engine.request import GenerationDefaults

CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "hi"})
HEADER = "x-tonle-max-tokens"

MODELS = GenerationDefaults(
    temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1, max_new_tokens=100, max_chat_tokens=100
)


def have(front: FakeFront, defaults: GenerationDefaults) -> None:
    assert front.card is not None
    front.card = msgspec.structs.replace(front.card, defaults=defaults)


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])
def test_the_models_fill_what_a_request_leaves_out(
    client: httpx.Client, front: FakeFront, path: str, body: dict[str, Any]
) -> None:
    have(front, MODELS)
    assert client.post(path, json=body).status_code == 200
    config = front.submitted[-1][0].config
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == (0.6, 20, 0.95, 0.1)
    assert config.repetition_penalty == 1.1


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])
def test_a_requests_own_values_win(client: httpx.Client, front: FakeFront, path: str, body: dict[str, Any]) -> None:
    have(front, MODELS)
    own = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 300}
    reply = client.post(path, json=body | own)
    config = front.submitted[-1][0].config
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == (1.0, 0, 1.0, 0.0)
    assert config.repetition_penalty == 1.0 and config.max_length == 300 and reply.headers[HEADER] == "300"


def test_a_greedy_request_keeps_the_models_repetition_penalty(client: httpx.Client, front: FakeFront) -> None:
    have(front, MODELS)
    client.post(CHAT[0], json=CHAT[1] | {"temperature": 0})
    config = front.submitted[-1][0].config
    assert config.greedy and config.repetition_penalty == 1.1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "defaults", "applied"), [
    ({}, GenerationDefaults(max_chat_tokens=7), 7),
    ({}, GenerationDefaults(), 512 - 1 - len("<user>hi\n<assistant>")),
    ({}, GenerationDefaults(max_chat_tokens=9999), 512 - 1 - len("<user>hi\n<assistant>")),
    ({"max_completion_tokens": 30}, GenerationDefaults(max_chat_tokens=7), 30),
    ({"max_tokens": 30}, GenerationDefaults(max_tokens_limit=20), 20),
    ({"min_tokens": 9}, GenerationDefaults(max_chat_tokens=7), 9),
])  # fmt: skip
def test_the_length_of_a_chat_is_told(
    client: httpx.Client,
    front: FakeFront,
    stream: bool,
    asked: dict[str, int],
    defaults: GenerationDefaults,
    applied: int,
) -> None:
    have(front, defaults)
    reply = client.post(CHAT[0], json={**CHAT[1], **asked, "stream": stream})
    assert reply.status_code == 200 and reply.headers[HEADER] == str(applied)
    assert front.submitted[-1][0].config.max_length == applied


@pytest.mark.parametrize(("asked", "applied"), [
    ({}, 16), ({"max_tokens": 3}, 3), ({"max_tokens": 0, "echo": True}, 0), ({"prompt": ["x" * 505, "x"]}, 16),
])  # fmt: skip
def test_a_text_gets_openais_sixteen(
    client: httpx.Client, front: FakeFront, asked: dict[str, Any], applied: int
) -> None:
    have(front, MODELS)
    reply = client.post(TEXT[0], json=TEXT[1] | asked)
    assert reply.status_code == 200 and reply.headers[HEADER] == str(applied)


def test_a_refused_request_has_no_length(client: httpx.Client) -> None:
    reply = client.post(CHAT[0], json=CHAT[1] | {"max_tokens": 0})
    assert reply.status_code == 400 and HEADER not in reply.headers
    assert reply.json()["error"]["param"] == "max_tokens"
