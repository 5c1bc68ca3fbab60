"""POST /v1/rerank and /v1/score of a pool: by a cross-encoder, or by the cosine of vectors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.encoders import InlinePool, KeptReply, save_encoder, save_modules
from tonle.errors import CallerError, ContextOverflow
from tonle.workers.endpoints.rerank import rerank, score
from tonle.workers.kind import Kind
from tonle.workers.kinds.embeddings import Embeddings
from tonle.workers.kinds.rerank import Rerank
from tonle.workers.worker_request import WorkerRequest

DOCUMENTS = ["cat", "paris is the capital of france", "the dog barks", "a b c"]
QUERY = "what is the capital"


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rerank, Any]:
    folder = tmp_path_factory.mktemp("cross")
    theirs = save_encoder("bert", folder, num_labels=1)
    kind = Rerank()
    kind.load(str(folder), "cpu", {"max_tokens": 24})
    return kind, theirs


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Embeddings:
    folder = tmp_path_factory.mktemp("vectors")
    save_encoder("xlm-roberta", folder)
    save_modules(folder, {"pooling_mode": "cls"}, prompts={"query": "what ", "document": "a "})
    kind = Embeddings()
    kind.load(str(folder), "cpu", {})
    return kind


def ask(kind: Kind, body: dict[str, Any], *, path: str = "/v1/rerank") -> Any:
    sink, request = KeptReply(), WorkerRequest(path, json.dumps(body).encode(), {"x-request-id": "req-1"})
    endpoint = rerank if path == "/v1/rerank" else score
    asyncio.run(endpoint(request, InlinePool(kind), sink))  # type: ignore[arg-type]
    assert sink.status == 200
    return json.loads(sink.body)


def theirs_of(model: Any, query: list[int], document: list[int]) -> float:
    ids = [0, *query, 2, *document, 2]
    types = [0] * (len(query) + 2) + [1] * (len(document) + 1)
    with torch.inference_mode():
        return float(model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits.sigmoid())


def test_a_cross_encoder_ranks_pairs(cross: tuple[Rerank, Any]) -> None:
    kind, theirs = cross
    reply = ask(kind, {"query": "cat", "documents": DOCUMENTS})
    scores = {each["index"]: each["relevance_score"] for each in reply["results"]}
    wanted = [theirs_of(theirs, [5], ids) for ids in ([5], [8, 9, 4, 10, 11, 12], [4, 14, 15, 7], [16, 17, 18])]
    assert np.abs(np.array([scores[place] for place in range(4)]) - wanted).max() < 1e-5
    assert [each["index"] for each in reply["results"]] == sorted(range(4), key=lambda place: -wanted[place])
    assert reply["usage"]["prompt_tokens"] == 4 * 4 + 1 + 6 + 4 + 3


def test_fields_of_rankings(cross: tuple[Rerank, Any]) -> None:
    kind, _ = cross
    body = {"query": QUERY, "documents": [{"text": each} for each in DOCUMENTS], "top_n": 2, "return_documents": False}
    assert [set(each) for each in ask(kind, body)["results"]] == [{"index", "relevance_score"}] * 2
    best = ask(kind, {"query": QUERY, "documents": DOCUMENTS, "top_n": 1})["results"][0]
    assert best["document"] == {"text": DOCUMENTS[best["index"]]}


def test_scores_are_in_the_order_of_the_request(cross: tuple[Rerank, Any]) -> None:
    kind, _ = cross
    ranking = ask(kind, {"query": QUERY, "documents": DOCUMENTS})["results"]
    wanted = [each["relevance_score"] for each in sorted(ranking, key=lambda each: each["index"])]
    reply = ask(kind, {"text_1": QUERY, "text_2": DOCUMENTS}, path="/v1/score")
    assert np.abs(np.array([each["score"] for each in reply["data"]]) - wanted).max() < 1e-6
    swapped = ask(kind, {"text_1": ["cat", QUERY, "cat"], "text_2": ["dog", "cat", "a"]}, path="/v1/score")["data"]
    for each, (query, document) in zip(swapped, [("cat", "dog"), (QUERY, "cat"), ("cat", "a")], strict=True):
        alone = ask(kind, {"text_1": query, "text_2": document}, path="/v1/score")["data"][0]
        assert abs(each["score"] - alone["score"]) < 1e-6


def test_long_documents(cross: tuple[Rerank, Any]) -> None:
    kind, _ = cross
    long = "cat " * 30
    with pytest.raises(ContextOverflow, match=r"documents\[1\] and the query") as error:
        ask(kind, {"query": "cat", "documents": ["dog", long]})
    assert error.value.param == "documents[1]"
    cut = ask(kind, {"query": "cat", "documents": [long], "max_tokens_per_doc": 2})["results"][0]
    short = ask(kind, {"query": "cat", "documents": ["cat cat"]})["results"][0]
    assert cut["relevance_score"] == pytest.approx(short["relevance_score"])


def test_embeddings_rank_by_cosine_with_their_prompts(vectors: Embeddings) -> None:
    from tests.unit.workers.endpoints.test_embeddings import ask as embed
    from tests.unit.workers.endpoints.test_embeddings import vectors as numbers

    query = numbers(embed(vectors, {"input": QUERY, "input_type": "query"}))[0]
    documents = numbers(embed(vectors, {"input": DOCUMENTS, "input_type": "document"}))
    reply = ask(vectors, {"query": QUERY, "documents": DOCUMENTS})
    assert [each["index"] for each in reply["results"]] == list(np.argsort(-(documents @ query)))
    scores = ask(vectors, {"text_1": QUERY, "text_2": DOCUMENTS}, path="/v1/score")["data"]
    assert np.abs(np.array([each["score"] for each in scores]) - documents @ query).max() < 1e-6
    cut = ask(vectors, {"query": QUERY, "documents": ["cat dog dog"], "max_tokens_per_doc": 2})["results"][0]
    assert cut["relevance_score"] == pytest.approx(
        ask(vectors, {"query": QUERY, "documents": ["cat dog"]})["results"][0]["relevance_score"], abs=1e-6
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [({"query": "x", "documents": []}, "documents"), ({"query": " ", "documents": ["x"]}, "query"),
     ({"query": "x", "documents": ["x"], "top_n": 0}, "top_n"),
     ({"query": "x", "documents": ["x"], "method": "yes_no"}, "method"),
     ({"query": "x", "documents": ["x"] * 1025}, "documents"), ({"query": "x"}, "documents"),
     ({"query": "x", "documents": ["x"], "max_tokens_per_doc": 0}, "max_tokens_per_doc")],
)  # fmt: skip
def test_what_is_refused(body: dict[str, Any], param: str, cross: tuple[Rerank, Any]) -> None:
    with pytest.raises(CallerError) as error:
        ask(cross[0], body)
    assert error.value.param == param
