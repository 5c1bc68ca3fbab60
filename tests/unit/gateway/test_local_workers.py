"""Which of a server's two parts answers: the engine, or a worker pool."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import Sink
from tonle.gateway.local_workers import EngineAndWorkers, LocalWorkers
from tonle.protocol.replies import ModelEntry


class Part:
    """Says its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str], sink: Sink, *, first_s: float,
        silence_s: float,
    ) -> None:  # fmt: skip
        sink.head(200, {})
        sink.data(self.name.encode())

    def close(self) -> None: ...


def answered_by(path: str, body: bytes, **by_path: tuple[str, ...]) -> str:
    entry = ModelEntry(id="minilm")
    metrics: Any = None
    workers = LocalWorkers(
        transport=Part("pools"), models=lambda: {"minilm": entry, "voice": entry},
        by_path={f"/v1/{name.replace('_', '/')}": models for name, models in by_path.items()}, metrics=metrics,
    )  # fmt: skip
    reply = BufferedReply()
    both = EngineAndWorkers(Part("engine"), workers)
    asyncio.run(both.send("POST", path, body, {}, reply, first_s=math.inf, silence_s=math.inf))
    return reply.body.decode()


@pytest.mark.parametrize(
    ("path", "model", "expected"),
    [
        ("/v1/embeddings", None, "pools"),
        ("/v1/embeddings", "minilm", "pools"),
        ("/v1/embeddings", "the-llm", "engine"),
        ("/v1/rerank", None, "engine"),  # no pool is made for it
        ("/v1/rerank", "minilm", "pools"),  # but one can, by cosine
        ("/v1/score", "the-llm", "engine"),
        ("/v1/audio/speech", "the-llm", "pools"),  # which say that they have no such model
        ("/v1/chat/completions", "minilm", "engine"),
    ],
)
def test_path_and_model_decide(path: str, model: str | None, expected: str) -> None:
    body = json.dumps({} if model is None else {"model": model}).encode()
    assert answered_by(path, body, embeddings=("minilm",), audio_speech=("voice",)) == expected


def test_a_pool_made_for_a_path_of_both_leaves_the_engine_its_own_requests() -> None:
    assert answered_by("/v1/score", b'{"model": "the-llm"}', score=("minilm",)) == "engine"
    assert answered_by("/v1/score", b"{}", score=("minilm",)) == "pools"


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[1]"])
def test_what_cannot_be_read_is_refused_by_whoever_answers_the_path(body: bytes) -> None:
    assert answered_by("/v1/embeddings", body, embeddings=("minilm",)) == "pools"
    assert answered_by("/v1/embeddings", body) == "engine"
