"""What bodies of /v1/embeddings, /v1/score and /v1/rerank mean, and the parts of their replies, whichever model computes.

Does: inputs and pairs out of requests, vectors and rankings into replies, with the bounds on both. Does not: tokenize, or know
a model.
"""

from __future__ import annotations

import asyncio
import base64

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from tonle.errors import InvalidRequest
from tonle.protocol.embeddings import (
    Document,
    EmbeddingData,
    PoolingUsage,
    RankedDocument,
    RerankRequest,
    ScoreRequest,
)
from tonle.protocol.openai import PromptTokensDetails

MAX_INPUTS = 2048  # of one request, as OpenAI's
MAX_REPLY_BYTES = 48 * 1024**2  # the gateway passes on 64 MiB
MAX_PAIRS = 1024  # of a query and a document, in one request
_AT_ONCE = 64  # vectors encoded before other requests have a turn
# A number in a reply: seventeen digits, sign, exponent and comma; or four bytes in base64.
_BYTES_PER_NUMBER = {"float": 22.0, "base64": 16 / 3}

# -- embeddings


def as_inputs(given: str | list[str | int | list[int]] | None) -> list[str | list[int]]:
    """One input or a list of them; a list of integers is one."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("input is an empty list", param="input")
    if all(isinstance(item, int) for item in given):
        return [given]  # type: ignore[list-item]
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(
            f"input has {len(given)} entries; one request may have at most {MAX_INPUTS}", param="input"
        )
    if all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given):
        return given  # type: ignore[return-value]
    raise InvalidRequest("input must hold only texts, only token ids, or only lists of token ids", param="input")


def check_reply_size(num_inputs: int, dimensions: int, encoding: str) -> None:
    """Raises `InvalidRequest`."""
    if num_inputs * dimensions * _BYTES_PER_NUMBER[encoding] > MAX_REPLY_BYTES:
        most = int(MAX_REPLY_BYTES / (dimensions * _BYTES_PER_NUMBER[encoding]))
        hint = ", or ask for encoding_format base64" if encoding == "float" else ""
        raise InvalidRequest(
            f"the reply to {num_inputs} inputs would be too long: an embedding has {dimensions} numbers. Send at most "
            f"{most} inputs in one request{hint}.", param="input",
        )  # fmt: skip


async def encoded(vectors: NDArray[np.float32], encoding: str) -> list[msgspec.Raw]:
    """The entries of `data` as JSON; other requests have their turn in between."""
    data = []
    for index, vector in enumerate(vectors):
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
        numbers = base64.b64encode(vector.astype("<f4")).decode() if encoding == "base64" else vector.tolist()
        data.append(msgspec.Raw(msgspec.json.encode(EmbeddingData(index, numbers))))
    return data


def pooling_usage(counts: list[tuple[int, int]]) -> PoolingUsage:
    """Of prompts: their tokens, and those of them found in the prefix cache."""
    total = sum(tokens for tokens, _ in counts)
    return PoolingUsage(total, total, PromptTokensDetails(sum(cached for _, cached in counts)))


# -- scores and rankings


def pairs_of(asked: ScoreRequest) -> tuple[list[str], list[str]]:
    """Queries and documents, as many of each: one query goes with every document."""
    given = {"text_1": asked.text_1, "queries": asked.queries, "text_2": asked.text_2, "documents": asked.documents}
    sides: list[tuple[str, list[str]]] = []
    for names in (("text_1", "queries"), ("text_2", "documents")):
        found = [(name, value) for name in names if (value := given[name]) is not None]
        if len(found) != 1:
            raise InvalidRequest(f"give either {names[0]} or {names[1]}", param=names[0])
        name, value = found[0]
        texts = [value] if isinstance(value, str) else value
        if not texts:
            raise InvalidRequest(f"{name} is an empty list", param=name)
        sides.append((name, texts))
    (first, queries), (second, documents) = sides
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        raise InvalidRequest(
            f"{first} has {len(queries)} texts and {second} has {len(documents)}: give one query, or one for each document",
            param=first,
        )
    return queries, documents


def documents_of(asked: RerankRequest) -> list[str]:
    """Raises `InvalidRequest`."""
    if not asked.documents:
        raise InvalidRequest("documents is an empty list", param="documents")
    if asked.top_n is not None and asked.top_n < 1:
        raise InvalidRequest("top_n must be at least 1", param="top_n")
    return [each.text if isinstance(each, Document) else each for each in asked.documents]


def check_documents(documents: list[str], max_tokens_per_doc: int | None) -> None:
    """Raises `InvalidRequest`."""
    if len(documents) > MAX_PAIRS:
        raise InvalidRequest(
            f"{len(documents)} documents are more than the {MAX_PAIRS} one request may have", param="documents"
        )
    if max_tokens_per_doc is not None and max_tokens_per_doc < 1:
        raise InvalidRequest("max_tokens_per_doc must be at least 1", param="max_tokens_per_doc")


def ranked(scores: list[float], documents: list[str], asked: RerankRequest) -> list[RankedDocument]:
    """Best first."""
    best = sorted(range(len(documents)), key=lambda index: -scores[index])[: asked.top_n]
    shown = asked.return_documents is not False
    return [RankedDocument(index, scores[index], Document(text=documents[index]) if shown else UNSET) for index in best]
