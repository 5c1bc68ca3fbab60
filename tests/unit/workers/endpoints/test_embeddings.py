"""POST /v1/embeddings of encoders: bodies into jobs, vectors into replies. The kind is real, the pool has no processes."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.encoders import InlinePool, KeptReply, save_encoder, save_modules
from tonle.errors import CallerError, ContextOverflow, InvalidRequest
from tonle.workers.endpoints.embeddings import embeddings
from tonle.workers.kinds.embeddings import Embeddings
from tonle.workers.worker_request import WorkerRequest


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Embeddings:
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder("bert", folder)
    save_modules(folder, {"pooling_mode": "mean"}, prompts={"query": "what ", "document": "a "}, max_tokens=20)
    found = Embeddings()
    found.load(str(folder), "cpu", {})
    return found


async def ask_async(pool: InlinePool, body: dict[str, Any], **headers: str) -> Any:
    sink = KeptReply()
    given = {"x-request-id": "req-1", **{name.replace("_", "-"): value for name, value in headers.items()}}
    await embeddings(WorkerRequest("/v1/embeddings", json.dumps(body).encode(), given), pool, sink)  # type: ignore[arg-type]
    assert sink.status == 200
    return json.loads(sink.body)


def ask(kind: Embeddings, body: dict[str, Any], **headers: str) -> Any:
    return asyncio.run(ask_async(InlinePool(kind), body, **headers))


def vectors(reply: Any) -> np.ndarray:
    return np.array([each["embedding"] for each in reply["data"]])


def test_one_vector_for_each_input_in_order(kind: Embeddings) -> None:
    texts = ["the cat purrs the dog barks", "cat", "paris is the capital of france", "dog"]
    reply = ask(kind, {"input": texts, "model": "tiny"})
    assert [each["index"] for each in reply["data"]] == [0, 1, 2, 3]
    assert (reply["model"], reply["id"], reply["object"]) == ("tiny", "embd-1", "list")
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == 10 + 3 + 8 + 3
    alone = np.concatenate([vectors(ask(kind, {"input": text})) for text in texts])
    assert np.abs(vectors(reply) - alone).max() < 1e-6
    assert np.abs(np.linalg.norm(alone, axis=1) - 1).max() < 1e-6


def test_base64_has_the_same_numbers(kind: Embeddings) -> None:
    numbers = vectors(ask(kind, {"input": "cat"}))[0]
    encoded = ask(kind, {"input": "cat", "encoding_format": "base64"})["data"][0]["embedding"]
    assert np.abs(np.frombuffer(base64.b64decode(encoded), "<f4") - numbers).max() < 1e-7


def test_token_ids_are_used_as_they_are(kind: Embeddings) -> None:
    text = vectors(ask(kind, {"input": "cat"}))
    assert np.array_equal(vectors(ask(kind, {"input": [0, 5, 2]})), text)
    assert np.array_equal(vectors(ask(kind, {"input": [[0, 5, 2]]})), text)
    assert np.array_equal(
        vectors(ask(kind, {"input": [5]})), vectors(ask(kind, {"input": "cat", "add_special_tokens": False}))
    )


def test_prompts_are_put_before_texts(kind: Embeddings) -> None:
    query = vectors(ask(kind, {"input": "what cat"}))
    assert np.array_equal(vectors(ask(kind, {"input": "cat", "input_type": "query"})), query)
    assert np.array_equal(vectors(ask(kind, {"input": "cat", "prompt_name": "query"})), query)
    assert not np.array_equal(vectors(ask(kind, {"input": "cat", "input_type": "document"})), query)


def test_normalize_can_be_left_out(kind: Embeddings) -> None:
    long = vectors(ask(kind, {"input": "cat", "normalize": False}))[0]
    assert abs(np.linalg.norm(long) - 1) > 0.01
    assert np.array_equal(vectors(ask(kind, {"input": "cat", "use_activation": False}))[0], long)
    assert np.abs(long / np.linalg.norm(long) - vectors(ask(kind, {"input": "cat"}))[0]).max() < 1e-6


def test_a_longer_input_is_cut_when_asked_for(kind: Embeddings) -> None:
    long = "cat " * 30
    with pytest.raises(ContextOverflow, match="input has 32 tokens, but the model takes 20"):
        ask(kind, {"input": long})
    reply = ask(kind, {"input": long, "truncate_prompt_tokens": -1})
    assert reply["usage"]["prompt_tokens"] == 20
    left = ask(
        kind, {"input": ["dog " + "cat " * 5, "cat dog"], "truncate_prompt_tokens": 4, "truncation_side": "left"}
    )
    assert np.array_equal(vectors(left), vectors(ask(kind, {"input": ["cat cat", "cat dog"]})))
    ids = ask(kind, {"input": [0, 5, 2, 5, 5], "truncate_prompt_tokens": 3})
    assert np.array_equal(vectors(ids), vectors(ask(kind, {"input": "cat"})))


def test_dimensions_need_a_model_that_was_trained_for_them(kind: Embeddings, tmp_path: Path) -> None:
    assert vectors(ask(kind, {"input": "cat", "dimensions": 32})).shape == (1, 32)
    with pytest.raises(InvalidRequest, match="must be 32, the model's own"):
        ask(kind, {"input": "cat", "dimensions": 8})
    nested = Embeddings()
    nested.load(str(kind.folder.path), "cpu", {"matryoshka_dimensions": [8, 16]})
    short = vectors(ask(nested, {"input": "cat", "dimensions": 8}))[0]
    whole = vectors(ask(kind, {"input": "cat"}))[0]
    assert np.abs(short - whole[:8] / np.linalg.norm(whole[:8])).max() < 1e-6
    with pytest.raises(InvalidRequest, match="trained for: 8, 16, 32"):
        ask(nested, {"input": "cat", "dimensions": 9})


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "input"), ({"input": []}, "input"), ({"input": ""}, "input"), ({"input": ["cat", " "]}, "input[1]"),
     ({"input": [1, "x"]}, "input"), ({"input": [[5], [64]]}, "input[1]"), ({"input": [-1]}, "input"),
     ({"input": [2**40]}, "input"), ({"input": [[]]}, "input"),
     ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
     ({"input": "x", "prompt_name": "none"}, "prompt_name"), ({"input": "x", "input_type": "none"}, "input_type"),
     ({"input": "x", "input_type": "query", "prompt_name": "query"}, "prompt_name"),
     ({"input": "x", "pooling": "last"}, "pooling"),
     ({"input": "x", "encoding_format": "hex"}, "encoding_format"), ({"input": ["x"] * 2049}, "input"),
     ({"messages": [{"role": "user", "content": "x"}]}, "messages")],
)  # fmt: skip
def test_what_is_refused(body: dict[str, Any], param: str, kind: Embeddings) -> None:
    with pytest.raises(CallerError) as error:
        ask(kind, body)
    assert error.value.param == param


def test_fields_without_effect_are_told(kind: Embeddings) -> None:
    reply = ask(kind, {"input": "cat", "priority": "high"})
    assert [each["param"] for each in reply["warnings"]] == ["priority"]
    with pytest.raises(InvalidRequest, match="strict mode"):
        ask(kind, {"input": "cat", "priority": "high"}, x_tonle_strict="1")


def test_a_large_request_leaves_room_for_small_ones(kind: Embeddings) -> None:
    """A bounded number of its inputs is in the pool, so one that comes later need not wait for all."""
    pool = InlinePool(kind, max_batch=4)

    async def both() -> tuple[int, Any]:
        large = asyncio.ensure_future(ask_async(pool, {"input": ["cat dog", "cat", "the cat purrs"] * 200}))
        await pool.until(20)  # it is under way
        await ask_async(pool, {"input": "paris"})
        done = len(pool.jobs)
        assert not large.done()
        return done, await large

    done, reply = asyncio.run(both())
    assert done < 60
    assert pool.most_inside <= 2 * 4 + 1
    assert len(reply["data"]) == 600
    assert np.abs(vectors(reply)[:3] - vectors(reply)[-3:]).max() < 1e-6
    sizes = [job.size for job in pool.jobs if job.size > 1]
    assert sizes[:50] == sorted(sizes[:50])  # by length, so that batches are even


def test_a_caller_who_leaves_withdraws_the_rest(kind: Embeddings) -> None:
    pool = InlinePool(kind)

    async def leave() -> None:
        large = asyncio.ensure_future(ask_async(pool, {"input": ["cat"] * 500}))
        await pool.until(20)  # it is under way
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
        await asyncio.sleep(0)
        seen = len(pool.jobs)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(pool.jobs) == seen
        assert pool.num_inside == 0

    asyncio.run(leave())
