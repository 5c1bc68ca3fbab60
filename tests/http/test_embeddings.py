"""/v1/embeddings, /v1/score and /v1/rerank of a real server with a small random model, through clients that are not ours."""

from __future__ import annotations

import base64
import http.client
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.fakes.adapters import merge, write_adapter
from tests.fakes.checkpoints import save_folder, tiny_model, tiny_tokenizer
from tests.fakes.server import Server, tonle_serve
from tests.parity.test_embeddings import expected
from tonle.bench import BenchOptions, Span, run_bench
from tonle.models.load.transformers_model import live_spec

TEXTS = ["the quick brown fox", "jumps over the lazy dog and then the other one", "ភាសាខ្មែរ"]
CONTEXT = 256
NUM_NUMBERS = 64


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By name, as transformers has them; and the folder."""
    folder = tmp_path_factory.mktemp("models")
    base = save_folder("llama", folder / "tiny")
    adapter = write_adapter(folder / "lora", live_spec(base), rank=4, modules=("q", "v", "up", "down"), seed=1)
    return {"m": base, "adapted": merge(tiny_model("llama"), adapter), "folder": folder}


@pytest.fixture(scope="module")
def server(models: dict[str, Any], records: Path) -> Iterator[Server]:
    folder = models["folder"]
    flags = ["--kv-cache-memory", "64MiB", "--max-num-seqs", "32", "--max-model-len", str(CONTEXT), "--device", "cpu",
             "--served-model-name", "m", "--audit-dir", str(records), "--lora", f"adapted={folder / 'lora'}"]  # fmt: skip
    with tonle_serve(folder / "tiny", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def http_client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def tokens_of(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text))


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def post(client: httpx.Client, path: str = "/v1/embeddings", **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(client: httpx.Client, path: str = "/v1/embeddings", **body: Any) -> tuple[str, str]:
    reply = client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]["param"], reply.json()["error"]["message"]


def test_openais_client(client: openai.OpenAI, models: dict[str, Any]) -> None:
    """It asks for base64 unless it is told otherwise."""
    replies = [client.embeddings.create(model="m", input=TEXTS)]
    replies.append(client.embeddings.create(model="m", input=TEXTS, encoding_format="float"))
    for reply in replies:
        assert [each.index for each in reply.data] == [0, 1, 2] and reply.model == "m"
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(len(tokens_of(text)) for text in TEXTS)
        for text, each in zip(TEXTS, reply.data, strict=True):
            wanted = unit(expected(models["m"], tokens_of(text), "last"))
            np.testing.assert_allclose(each.embedding, wanted, atol=1e-4)
    # Computed twice, perhaps by torch once and then by the kernels that were compiled meanwhile.
    base64s, floats = ([each.embedding for each in reply.data] for reply in replies)
    np.testing.assert_allclose(base64s, floats, atol=2e-6)


@pytest.mark.parametrize("name", ["m", "adapted"])
def test_pooling_and_length(http_client: httpx.Client, models: dict[str, Any], name: str) -> None:
    reply = post(http_client, model=name, input=TEXTS, pooling="mean", normalize=False)
    for text, each in zip(TEXTS, reply["data"], strict=True):
        np.testing.assert_allclose(each["embedding"], expected(models[name], tokens_of(text), "mean"), atol=1e-3)
    vllms = post(http_client, model=name, input=TEXTS, pooling="mean", use_activation=False)
    np.testing.assert_allclose(vllms["data"][0]["embedding"], reply["data"][0]["embedding"], atol=1e-5)


def test_every_form_of_input(http_client: httpx.Client) -> None:
    tokens = [tokens_of(text) for text in TEXTS]
    wanted = [each["embedding"] for each in post(http_client, input=TEXTS)["data"]]
    for given, places in ((tokens, [0, 1, 2]), (tokens[1], [1]), (TEXTS[2], [2]), ([TEXTS[0]], [0])):
        found = post(http_client, input=given)["data"]
        np.testing.assert_allclose(
            [each["embedding"] for each in found], [wanted[place] for place in places], atol=1e-5
        )
    cut = post(http_client, input=tokens[1] + [5] * 300, truncate_prompt_tokens=len(tokens[1]))
    np.testing.assert_allclose(cut["data"][0]["embedding"], wanted[1], atol=1e-5)
    end = post(http_client, input=[5] * 300 + tokens[1], truncate_prompt_tokens=len(tokens[1]), truncation_side="left")
    np.testing.assert_allclose(end["data"][0]["embedding"], wanted[1], atol=1e-5)
    assert (
        post(http_client, input="the quick " * 50_000, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == CONTEXT
    )
    chat = post(http_client, messages=[{"role": "user", "content": "hello"}], dimensions=NUM_NUMBERS)
    assert len(chat["data"][0]["embedding"]) == NUM_NUMBERS


def test_a_full_request(http_client: httpx.Client) -> None:
    """As many inputs as there may be, as compact as they come; many times the engine's batch."""
    reply = post(http_client, input=[[7 + i % 300] for i in range(2048)], encoding_format="base64")
    assert [each["index"] for each in reply["data"]] == list(range(2048))
    vectors = np.stack([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in reply["data"]])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[:5], vectors[300:305], atol=1e-5)
    assert abs(vectors[0] @ vectors[1]) < 0.99


def test_refusals(http_client: httpx.Client) -> None:
    for body, param, part in (
        ({"input": ["a", "the quick " * 100]}, "input[1]", "shorten"),
        ({"input": ["a", "the quick " * 500_000]}, "input[1]", "characters"),
        ({"input": [[1, 2], [3, 100_000]]}, "input[1]", "0 to 319"),
        ({"input": [[1, 2], []]}, "input[1]", "empty"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["a", [1]]}, "input", "only texts"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({}, "input", "either input or messages"),
        ({"input": "a", "dimensions": 16}, "dimensions", "must be 64"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64, float"),
        ({"input": "a", "pooling": "max"}, "pooling", "last, mean"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "float32"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 or more"),
        ({"input": "a", "priority": "soon"}, "priority", "must be"),
    ):
        found, message = refused(http_client, **body)
        assert found == param and part in message, (body, message)
    assert http_client.post("/v1/embeddings", json={"input": "a", "model": "other"}).status_code == 404


def test_a_caller_that_leaves_frees_the_engine(server: Server, http_client: httpx.Client) -> None:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    body = json.dumps({"input": [[i % 300 + 3] * 250 for i in range(2048)], "pooling": "mean"})
    connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
    wait_for(lambda: http_client.get("/health").json()["running"] > 0, "it never began")
    connection.close()

    def is_idle() -> bool:
        health = http_client.get("/health").json()
        return bool(health["running"] == health["waiting"] == 0)

    wait_for(is_idle, "it goes on")


def wait_for(condition: Any, what: str) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(what)


def test_tokens_are_counted(http_client: httpx.Client) -> None:
    def counted() -> float:
        lines = http_client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prompt_tokens_total"))

    before = counted()
    post(http_client, input=[[9] * 100, [11] * 50], pooling="mean")
    wait_for(lambda: counted() - before == 150, "prompt tokens are not counted")


def test_a_record_has_no_vectors(http_client: httpx.Client, records: Path) -> None:
    post(http_client, input=[TEXTS[0]] * 20, user="someone")
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = [json.loads(path.read_text()) for path in records.rglob("embeddings_*.json")]
        return any(record["prompt"] == [TEXTS[0]] * 20 for record in found)

    wait_for(is_there, "no record")
    record = next(record for record in found if record["prompt"] == [TEXTS[0]] * 20)
    text = json.dumps(record)
    assert '"num_embeddings": 20' in text and f'"dimensions": {NUM_NUMBERS}' in text and '"sha256"' in text
    assert len(text) < 4000 and record["usage"]["prompt_tokens"] > 0


# -- scores


def likelihood(model: Any, query: str, document: str) -> float:
    before, asked = tokens_of(f"{document}\n\nQuestion:"), tokens_of(f" {query}")
    with torch.inference_mode():
        table = model(torch.tensor([before + asked])).logits[0].log_softmax(-1)
    told = [float(table[len(before) - 1 + i, token]) for i, token in enumerate(asked)]
    return math.exp(sum(told) / len(told))


def yes_no(model: Any, query: str, document: str) -> float:
    before = tokens_of(f"Query: {query}\nDocument: {document}\nQuestion: Does the document answer the query?\nAnswer:")
    sums = []
    for label in (" Yes", " No"):
        asked = tokens_of(label)
        with torch.inference_mode():
            table = model(torch.tensor([before + asked])).logits[0].log_softmax(-1)
        sums.append(sum(float(table[len(before) - 1 + i, token]) for i, token in enumerate(asked)))
    return 1 / (1 + math.exp(sums[1] - sums[0]))


@pytest.mark.parametrize("name", ["m", "adapted"])
@pytest.mark.parametrize(("method", "reference"), [("likelihood", likelihood), ("yes_no", yes_no)])
def test_scores(http_client: httpx.Client, models: dict[str, Any], name: str, method: str, reference: Any) -> None:
    documents = [*TEXTS, "what is the capital of that land?" * 3, ""]
    query = "what is the other one?"
    wanted = [reference(models[name], query, document) for document in documents]
    for path in ("/v1/score", "/score"):
        reply = post(http_client, path, model=name, text_1=query, text_2=documents, method=method)
        np.testing.assert_allclose([each["score"] for each in reply["data"]], wanted, rtol=1e-3)
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 0
    pairs = post(http_client, "/v1/score", model=name, queries=[query, "fox"], documents=TEXTS[:2], method=method)
    assert pairs["data"][1]["score"] == pytest.approx(reference(models[name], "fox", TEXTS[1]), rel=1e-3)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        ranked = post(http_client, path, model=name, query=query, documents=[{"text": each} for each in documents],
                      method=method)  # fmt: skip
        assert [each["index"] for each in ranked["results"]] == list(np.argsort(wanted)[::-1])
        for each in ranked["results"]:
            assert each["relevance_score"] == pytest.approx(wanted[each["index"]], rel=1e-3)
            assert each["document"] == {"text": documents[each["index"]]}


def test_ranking_options(http_client: httpx.Client) -> None:
    body = {"query": "fox", "documents": TEXTS}
    best = post(http_client, "/v1/rerank", **body, top_n=1, return_documents=False)["results"]
    assert len(best) == 1 and "document" not in best[0]
    assert best[0]["index"] == post(http_client, "/v1/rerank", **body)["results"][0]["index"]
    long = ["the quick " * 400, "lazy"]
    param, message = refused(http_client, "/v1/rerank", query="fox", documents=long)
    assert param == "documents[0]" and "max_tokens_per_doc" in message
    assert len(post(http_client, "/v1/rerank", query="fox", documents=long, max_tokens_per_doc=50)["results"]) == 2
    for path, wrong, param in (
        ("/v1/rerank", {"query": "fox", "documents": []}, "documents"),
        ("/v1/rerank", {"query": " ", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "fox", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "fox", "documents": ["a"] * 1025}, "documents"),
        ("/v1/rerank", {"query": "fox", "documents": ["a"], "method": "guess"}, "method"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
    ):
        assert refused(http_client, path, **wrong)[0] == param, wrong


def test_documents_that_are_asked_about_again_are_cached(http_client: httpx.Client) -> None:
    body: dict[str, Any] = {"documents": ["and then the other one; " * 8], "query": "what is the capital?"}
    first = post(http_client, "/v1/rerank", **body)["usage"]
    again = post(http_client, "/v1/rerank", **{**body, "query": "sleep?"})["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] > 32


def test_our_benchmark_counts_what_the_server_counts(server: Server) -> None:
    settings: dict[str, Any] = {"url": server.url, "items": Span(2, 4), "sentences": Span(1, 1), "requests": 5}
    for kind, more in (("embeddings", {}), ("rerank", {"extra_body": {"max_tokens_per_doc": 40}})):
        report = run_bench(BenchOptions(kind=kind, concurrency=(2,), **settings, **more))  # type: ignore[arg-type]
        assert report.ok, report.levels[0].failures
        level = report.levels[0]
        assert level.items is not None and 10 <= level.items <= 20
        assert level.prompt_tokens is not None and level.prompt_tokens > 5 * level.items
        assert level.e2el_ms is not None and level.e2el_ms.count == 5
