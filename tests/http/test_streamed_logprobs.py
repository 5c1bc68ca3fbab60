"""Streams with log-probabilities: the chunk that has a token's text has its log-probability. A real front, a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.http.serving import events, serving
from tests.unit.engine.text.tokenizers_for_tests import EOS, byte_level_tokenizer
from tonle.engine.front import Front
from tonle.engine.messages import LoopStats, ModelCard, Step, Submit, ToEngine
from tonle.engine.request import TokenLogprob
from tonle.engine.text import Text

REPLY = "The ខ្មែរ word, 12 times: ស្រី!"


class Engine:
    """Answers every request with `REPLY`, a token in each turn of the event loop."""

    def __init__(self) -> None:
        tokenizer = SimpleNamespace(backend_tokenizer=byte_level_tokenizer(), chat_template="{{ messages[0].content }}")
        self.front = Front(Text.from_live(tokenizer), "bytes", self.send)
        self.front.deliver(ModelCard("L", 512, 257, [EOS], "cpu", "float32", 16, 100, 8, 64, 1.0))

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            for request in message.requests:
                asyncio.get_running_loop().call_soon(self.tell, request.handle, [*REPLY.encode(), EOS])

    def tell(self, handle: int, tokens: list[int]) -> None:
        token, *rest = tokens
        finished: dict[int, tuple[str, int | None]] = {} if rest else {handle: ("stop", token)}
        record = TokenLogprob(token, -token / 10, [])
        self.front.deliver(Step([handle], [1], [token], finished, logprobs={handle: [record]}, stats=LoopStats()))
        if rest:
            asyncio.get_running_loop().call_later(0.001, self.tell, handle, rest)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(Engine().front) as url:
        yield url


def choices(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = httpx.post(f"{url}{path}", json={"stream": True, "max_tokens": 100, **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    return [choice for event in events(reply.text)[:-1] for choice in event["choices"]]


def test_completions(server: str) -> None:
    found = choices(server, "/v1/completions", prompt="x", logprobs=0)
    chunks = [choice for choice in found if choice["text"]]
    assert "".join(chunk["text"] for chunk in chunks) == REPLY and len(chunks) > 5
    num_chars = 0
    for chunk in chunks:
        logprobs = chunk["logprobs"]
        if chunk["text"].isascii():
            assert "".join(logprobs["tokens"]).removesuffix("<end>") == chunk["text"]
        offsets = range(num_chars, num_chars + len(chunk["text"]))
        assert {*offsets} <= {*logprobs["text_offset"]} <= {*offsets, num_chars + len(chunk["text"])}
        num_chars += len(chunk["text"])
    values = [value for choice in found if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    assert values == [-token / 10 for token in [*REPLY.encode(), EOS]]


def test_chat(server: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    found = choices(server, "/v1/chat/completions", messages=messages, logprobs=True)
    chunks = [choice for choice in found if choice["logprobs"]]
    assert len(chunks) > 5
    assert not any(choice["delta"].get("content") for choice in found if choice not in chunks)
    tokens = []
    for chunk in chunks:
        entries = [entry for entry in chunk["logprobs"]["content"] if entry["token"] != "<end>"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == chunk["delta"]["content"]
        tokens += [entry["bytes"][0] for entry in entries]
    assert bytes(tokens).decode() == REPLY
