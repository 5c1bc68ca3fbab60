"""POST /v1/rerank and /v1/score of a pool: how well documents fit a query.

With a pool of cross-encoders by their scores, 0 to 1; with a pool of embeddings by the cosine of the vectors, -1 to 1.

Does: parse, tokenize, have the pool compute all, sort. Does not: compute.
"""

from __future__ import annotations

import time

import numpy as np
from msgspec import UNSET

from tonle.edge.client import Sink
from tonle.errors import InvalidRequest
from tonle.protocol.embeddings import Ranking, RerankRequest, ScoreData, ScoreList, ScoreRequest, ScoringFields
from tonle.protocol.openai import FieldWarning
from tonle.protocol.parse import parse
from tonle.protocol.pooling_bodies import check_documents, documents_of, pairs_of, pooling_usage, ranked
from tonle.workers.encoders.text import Cut, EncoderText, Tokens
from tonle.workers.encoders.token_job import token_job
from tonle.workers.endpoints.encoder_pool import answer_id, check_strict, on_thread, run_jobs, send, text_of
from tonle.workers.pool import WorkerPool
from tonle.workers.worker_request import WorkerRequest


async def rerank(request: WorkerRequest, pool: WorkerPool, sink: Sink) -> None:
    asked, warnings = parse(request.body, RerankRequest)
    _look(request, asked, warnings)
    documents = documents_of(asked)
    scores, tokens = await _scores(request, pool, asked, [asked.query] * len(documents), documents)
    reply = Ranking(
        id=answer_id(request, "rerank"), model=pool.model, results=ranked(scores, documents, asked),
        usage=pooling_usage([(tokens, 0)]), warnings=warnings or UNSET,
    )  # fmt: skip
    send(sink, reply, warnings)


async def score(request: WorkerRequest, pool: WorkerPool, sink: Sink) -> None:
    asked, warnings = parse(request.body, ScoreRequest)
    _look(request, asked, warnings)
    queries, documents = pairs_of(asked)
    scores, tokens = await _scores(request, pool, asked, queries, documents)
    reply = ScoreList(
        id=answer_id(request, "score"), created=int(time.time()), model=pool.model,
        data=[ScoreData(index, value) for index, value in enumerate(scores)], usage=pooling_usage([(tokens, 0)]),
        warnings=warnings or UNSET,
    )  # fmt: skip
    send(sink, reply, warnings)


def _look(request: WorkerRequest, asked: ScoringFields, warnings: list[FieldWarning]) -> None:
    """At what is a decoder's. Raises `InvalidRequest`."""
    if asked.method is not None:
        raise InvalidRequest(
            "method is for language models; an encoder has one way to score: leave it out", param="method"
        )
    if asked.priority is not None:
        warnings.append(FieldWarning("priority", "has no effect: a pool of workers takes jobs as they come"))
    check_strict(request, warnings)


async def _scores(
    request: WorkerRequest, pool: WorkerPool, asked: ScoringFields, queries: list[str], documents: list[str]
) -> tuple[list[float], int]:
    """Of each pair, and the tokens of all. Raises `TonleError`."""
    most = asked.max_tokens_per_doc
    check_documents(documents, most)
    for query in queries:
        if not query.strip():
            raise InvalidRequest("the query is empty", param="query")
    text = await text_of(pool)
    if text.facts.dimensions:
        return await _cosines(request, pool, text, queries, documents, most)
    pairs = await on_thread(request, lambda: _pairs(text, queries, documents, most))
    results = await run_jobs(pool, [token_job(pair) for pair in pairs])
    return [float(result.fields["score"]) for result in results], sum(len(pair.ids) for pair in pairs)


def _pairs(text: EncoderText, queries: list[str], documents: list[str], most: int | None) -> list[Tokens]:
    """A query that comes again is tokenized once."""
    places: dict[str, list[int]] = {}
    for place, query in enumerate(queries):
        places.setdefault(query, []).append(place)
    found: dict[int, Tokens] = {}
    for query, own in places.items():
        names = [f"documents[{place}]" for place in own]
        found |= dict(zip(own, text.encode_pairs(query, [documents[place] for place in own], names, most), strict=True))
    return [found[place] for place in range(len(queries))]


async def _cosines(
    request: WorkerRequest, pool: WorkerPool, text: EncoderText, queries: list[str], documents: list[str],
    most: int | None,
) -> tuple[list[float], int]:  # fmt: skip
    """Each text is computed once, with the prompt that the model has for queries or for documents."""
    asked = list(dict.fromkeys(queries))

    def tokens() -> list[Tokens]:
        names = [f"documents[{place}]" for place in range(len(documents))]
        ask, tell = text.prompt(None, "query"), text.prompt(None, "document")
        around = text.num_special + text.num_before(tell)
        cut = None if most is None else Cut(min(most + around, text.facts.max_tokens))
        return text.encode(asked, ["query"] * len(asked), prompt=ask) + text.encode(
            documents, names, prompt=tell, cut=cut
        )

    found = await on_thread(request, tokens)
    results = await run_jobs(pool, [token_job(each) for each in found])
    vectors = [np.frombuffer(result.media[0], "<f4") for result in results]
    by_query = dict(zip(asked, vectors, strict=False))
    pairs = zip(queries, vectors[len(asked) :], strict=True)
    return [float(by_query[query] @ vector) for query, vector in pairs], sum(len(each.ids) for each in found)
