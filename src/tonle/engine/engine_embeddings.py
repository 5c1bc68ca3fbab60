"""`EngineEmbeddings`: the calls of `InferenceEngine` that give embeddings. From any thread but the front's own."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tonle.engine.embedding import Embedding, Vector, normalized
from tonle.engine.request import RequestPriority
from tonle.errors import InvalidRequest

if TYPE_CHECKING:
    from tonle.engine.front import Front

T = TypeVar("T")

Embeddable = str | list[int] | list[dict[str, Any]]  # text, token ids, or chat messages


class EngineEmbeddings:
    """A part of `InferenceEngine`, which has the front."""

    @property
    @abstractmethod
    def front(self) -> Front: ...

    @abstractmethod
    def on_front(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]: ...

    def embed(
        self,
        texts: Embeddable | Sequence[Embeddable],
        pooling: str = "last",
        normalize: bool = True,
        *,
        adapter: str | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
    ) -> Vector:
        """Vectors (N, hidden size) float32 of N texts (strings, token ids or chat messages); of one text, (hidden size,).

        `pooling`: the hidden state of the "last" token, or the "mean" of all tokens'. `normalize`: scale each to length 1, so
        that a dot product is a cosine. Any number of texts: they are computed in batches.
        """
        prompts = _encode(self.front, texts)
        found = self.on_front(self.front.embed(prompts, pooling=pooling, adapter=adapter, priority=priority)).result()
        return _vectors(found, texts, normalize)

    async def embed_async(
        self,
        texts: Embeddable | Sequence[Embeddable],
        pooling: str = "last",
        normalize: bool = True,
        *,
        adapter: str | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
    ) -> Vector:
        """As `embed`, on any event loop. Cancelling the await frees what is under way."""
        front = self.front
        prompts = await asyncio.to_thread(_encode, front, texts)
        embedding = self.on_front(front.embed(prompts, pooling=pooling, adapter=adapter, priority=priority))
        return _vectors(await asyncio.wrap_future(embedding), texts, normalize)


def _encode(front: Front, texts: Embeddable | Sequence[Embeddable]) -> list[list[int]]:
    return [_encode_one(front, text) for text in ([texts] if _is_one(texts) else texts)]


def _vectors(found: list[Embedding], texts: Embeddable | Sequence[Embeddable], normalize: bool) -> Vector:
    vectors = np.stack([each.vector for each in found]) if found else np.empty((0, 0), np.float32)
    vectors = normalized(vectors) if normalize else vectors
    return vectors[0] if _is_one(texts) else vectors


def _is_one(texts: Any) -> bool:
    if isinstance(texts, str):
        return True
    if not isinstance(texts, list | tuple):
        raise InvalidRequest(f"texts must be a string or a list, not {texts!r:.200}", param="texts")
    return bool(texts) and isinstance(texts[0], int | dict)


def _encode_one(front: Front, text: Any) -> list[int]:
    if isinstance(text, str):
        return front.text.encode(text)
    if isinstance(text, list | tuple) and text and all(isinstance(message, dict) for message in text):
        return front.text.encode_chat(list(text), add_generation_prompt=False)
    if isinstance(text, list | tuple) and all(isinstance(token, int) for token in text):
        return list(text)
    raise InvalidRequest("each text must be a string, a list of token ids or a list of chat messages", param="texts")
