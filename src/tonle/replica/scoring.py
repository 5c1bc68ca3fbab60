"""POST /v1/score and /v1/rerank: how well documents fit a query, by log-probabilities of a decoder.

    likelihood   how likely the query is as a question about the document: exp of the mean log-probability of its tokens
    yes_no       the model is asked whether the document answers the query: the share of Yes against No

Does: write the prompts, have the engine compute all, sort. Does not: know HTTP.
With likelihood a document stands before the query, so the prefix cache helps with documents that are asked about again. With
yes_no the query stands first, and is computed once for all documents.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from tonle.engine.front import Front
from tonle.engine.messages import ModelCard
from tonle.engine.request import GenerationConfig, GenerationResult, RequestPriority
from tonle.engine.text import Text
from tonle.errors import ContextOverflow, InvalidRequest
from tonle.protocol.embeddings import (
    PoolingUsage,
    Ranking,
    RerankRequest,
    ScoreData,
    ScoreList,
    ScoreRequest,
    ScoringFields,
)
from tonle.protocol.openai import FieldWarning
from tonle.protocol.parse import parse, warning_headers
from tonle.protocol.pooling_bodies import check_documents, documents_of, pairs_of, pooling_usage, ranked
from tonle.replica.embeddings import CHARS_PER_TOKEN
from tonle.replica.endpoints import EndpointReply
from tonle.replica.generate import THREAD_BYTES
from tonle.replica.replica import Replica, ReplicaRequest
from tonle.replica.translate import read_priority_field

_ROUNDS = 2  # batches of the engine that one request may fill, as embeddings do
_QUESTION = "\n\nQuestion:"
_INTRODUCTION = "Query: {query}\nDocument: "
_ASK = "\nQuestion: Does the document answer the query?\nAnswer:"
_LABELS = (" Yes", " No")


@dataclass(frozen=True, slots=True)
class Told:
    """A prompt whose last tokens' log-probabilities are wanted."""

    prompt: list[int]
    start: int  # of these


@dataclass(frozen=True, slots=True)
class ScoringOrder:
    """What one HTTP request asks of the engine: for each pair one prompt (likelihood) or two (yes_no)."""

    method: str
    pairs: list[list[Told]]
    priority: RequestPriority


@dataclass(frozen=True, slots=True)
class Scored:
    scores: list[float]
    results: list[GenerationResult]


async def score(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    asked, warnings = parse(request.body, ScoreRequest)
    queries, documents = pairs_of(asked)
    model, scored = await _compute(replica, request, asked, queries, documents, warnings)
    reply = ScoreList(
        id=request.answer_id("score"), created=int(time.time()), model=model,
        data=[ScoreData(index, value) for index, value in enumerate(scored.scores)], usage=_usage(scored),
        warnings=warnings or UNSET,
    )  # fmt: skip
    return EndpointReply(msgspec.json.encode(reply), headers=warning_headers(warnings))


async def rerank(replica: Replica, request: ReplicaRequest) -> EndpointReply:
    asked, warnings = parse(request.body, RerankRequest)
    documents = documents_of(asked)
    model, scored = await _compute(replica, request, asked, [asked.query] * len(documents), documents, warnings)
    results = ranked(scored.scores, documents, asked)
    reply = Ranking(
        id=request.answer_id("rerank"), model=model, results=results, usage=_usage(scored), warnings=warnings or UNSET
    )
    return EndpointReply(msgspec.json.encode(reply), headers=warning_headers(warnings))


async def _compute(
    replica: Replica, request: ReplicaRequest, asked: ScoringFields, queries: list[str], documents: list[str],
    warnings: list[FieldWarning],
) -> tuple[str, Scored]:  # fmt: skip
    """The name of the model, and a score for each pair."""
    card = replica.card()
    model = replica.resolve(asked.model)
    adapter = replica.adapter(model)
    replica.check_strict(request, warnings)
    text = replica.front.text
    if len(request.body) > THREAD_BYTES:
        order = await asyncio.to_thread(scoring_order, asked, queries, documents, text, card)
    else:
        order = scoring_order(asked, queries, documents, text, card)
    prompts = [told for pair in order.pairs for told in pair]
    results = await _all_told(replica.front, prompts, order.priority, request.salt, adapter, card)
    for result in results:
        replica.metrics.prompt_tokens.observe(result.usage.prompt_tokens)
        replica.metrics.count_finished("stop")
    sums = [_logprobs(result, told) for result, told in zip(results, prompts, strict=True)]
    if order.method == "likelihood":
        return model, Scored([math.exp(sum(each) / len(each)) for each in sums], results)
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return model, Scored([_share(sum(yes), sum(no)) for yes, no in pairs], results)


def _share(yes: float, no: float) -> float:
    """Of Yes, from the log-probabilities of both."""
    return 1 / (1 + math.exp(min(no - yes, 700.0)))


def _logprobs(result: GenerationResult, told: Told) -> list[float]:
    assert result.prompt_logprobs is not None
    return [record.logprob for record in result.prompt_logprobs[told.start :] if record is not None]


def _usage(scored: Scored) -> PoolingUsage:
    return pooling_usage([(result.usage.prompt_tokens, result.usage.cached_tokens) for result in scored.results])


async def _all_told(
    front: Front, prompts: list[Told], priority: RequestPriority, salt: bytes, adapter: str | None, card: ModelCard
) -> list[GenerationResult]:
    """A bounded number of them is with the engine at a time; all are withdrawn if one fails, or the caller leaves."""
    room = asyncio.Semaphore(_ROUNDS * card.max_num_seqs)

    async def tell(told: Told) -> GenerationResult:
        async with room:
            config = GenerationConfig(
                max_length=1, do_sample=False, prompt_logprobs=0, prompt_logprobs_start=told.start
            )
            generation = front.submit(told.prompt, config, priority=priority, salt=salt, adapter=adapter)
            try:
                return await generation.result()
            finally:
                generation.cancel()

    tasks = [asyncio.ensure_future(tell(told)) for told in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


# -- prompts


def scoring_order(
    asked: ScoringFields, queries: list[str], documents: list[str], text: Text, card: ModelCard
) -> ScoringOrder:
    """Raises `CallerError`."""
    check_documents(documents, asked.max_tokens_per_doc)
    method = asked.method or "likelihood"
    write = told_likelihood if method == "likelihood" else told_yes_no
    pairs = []
    for place, (query, document) in enumerate(zip(queries, documents, strict=True)):
        if not query.strip():
            raise InvalidRequest("the query is empty", param="query")
        pair = write(query, _shortened(document, asked.max_tokens_per_doc, text), text)
        longest = max(len(told.prompt) for told in pair)
        if longest + 1 > card.context_length:
            raise ContextOverflow(
                f"documents[{place}] and the query have {longest} tokens together; the model's context is "
                f"{card.context_length} tokens, and one must be left. Shorten the document, or set max_tokens_per_doc.",
                param=f"documents[{place}]",
            )
        pairs.append(pair)
    return ScoringOrder(method, pairs, read_priority_field(asked.priority))


def _shortened(document: str, most: int | None, text: Text) -> str:
    if most is None or len(document.encode(errors="replace")) <= most:  # a token has a byte at least
        return document
    tokens = text.encode(document[: most * CHARS_PER_TOKEN], add_special_tokens=False)
    return text.decode(tokens[:most]).rstrip("\ufffd")  # the cut may go through a letter


def told_likelihood(query: str, document: str, text: Text) -> list[Told]:
    """How likely the query is after the document."""
    before = text.encode(document + _QUESTION)
    return [Told(before + text.encode(f" {query.strip()}", add_special_tokens=False), len(before))]


def told_yes_no(query: str, document: str, text: Text) -> list[Told]:
    """How likely either answer is."""
    before = text.encode(_INTRODUCTION.format(query=query.strip()) + document + _ASK)
    return [Told(before + text.encode(label, add_special_tokens=False), len(before)) for label in _LABELS]
