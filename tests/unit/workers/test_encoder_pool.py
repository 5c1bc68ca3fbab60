"""Encoders in worker processes, asked through the transport: also by the `openai` client, as it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest

from tests.fakes.encoders import InlinePool, KeptReply, save_encoder
from tests.unit.workers.endpoints.test_embeddings import ask_async, vectors
from tonle.workers.kinds.embeddings import Embeddings
from tonle.workers.pool import WorkerPool
from tonle.workers.pool_config import PoolConfig
from tonle.workers.transport import WorkersTransport


class Serving(NamedTuple):
    """Two pools with one process each, which start once for all tests; every test runs on the loop they belong to."""

    runner: asyncio.Runner
    transport: WorkersTransport
    folder: Path  # of the embeddings


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    root = tmp_path_factory.mktemp("models")
    save_encoder("bert", root / "embeddings")
    save_encoder("bert", root / "rerank", num_labels=1)
    pools = [
        WorkerPool(PoolConfig(
            kind=kind, model=str(root / kind), served_name=f"my-{kind}", options={"threads": 1}, max_batch=4, max_queue=32,
            max_wait_ms=0.0,
        ))
        for kind in ("embeddings", "rerank")
    ]  # fmt: skip
    with asyncio.Runner() as runner:
        for pool in pools:
            runner.run(pool.start())
        try:
            yield Serving(runner, WorkersTransport(pools), root / "embeddings")
        finally:
            for pool in pools:
                runner.run(pool.stop())


async def post(transport: WorkersTransport, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    sink, data = KeptReply(), json.dumps(body).encode()
    await transport.send("POST", path, data, {"X-Request-Id": "req-1"}, sink, first_s=60, silence_s=60)
    return sink.status, json.loads(sink.body)


class _InProcess(httpx.AsyncBaseTransport):
    """HTTP of a client straight into the pools."""

    def __init__(self, pools: WorkersTransport) -> None:
        self._pools = pools

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        sink, body, headers = KeptReply(), await request.aread(), dict(request.headers)
        await self._pools.send(request.method, request.url.path, body, headers, sink, first_s=60, silence_s=60)
        return httpx.Response(sink.status, headers=sink.headers, content=sink.body)


def test_the_openai_client_as_it_is(serving: Serving) -> None:
    async def ask() -> None:
        http = httpx.AsyncClient(transport=_InProcess(serving.transport))
        client = openai.AsyncOpenAI(api_key="none", base_url="http://pools/v1", http_client=http, max_retries=0)
        texts = ["the cat purrs", "cat", "paris is the capital of france"] * 30
        reply = await client.embeddings.create(model="my-embeddings", input=texts)
        found = np.array([each.embedding for each in reply.data])
        floats = await client.embeddings.create(model="my-embeddings", input=texts[:3], encoding_format="float")
        assert found.shape == (90, 32)
        assert np.abs(found[:3] - np.array([each.embedding for each in floats.data])).max() < 1e-6
        assert reply.usage.prompt_tokens == 30 * (6 + 3 + 8)
        with pytest.raises(openai.BadRequestError, match="input is empty"):
            await client.embeddings.create(model="my-embeddings", input="")
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="cat")
        in_process = Embeddings()
        in_process.load(str(serving.folder), "cpu", {})
        alone = vectors(await ask_async(InlinePool(in_process), {"input": texts[:3]}))
        assert np.abs(found[:3] - alone).max() < 1e-5

    serving.runner.run(ask())


def test_a_request_may_have_more_inputs_than_the_queue_has_room(serving: Serving) -> None:
    """They are handed in as there is room, and small requests are answered in between."""

    async def ask() -> None:
        body = {"input": ["cat dog", "cat", "a b c"] * 100}
        large = asyncio.ensure_future(post(serving.transport, "/v1/embeddings", body))
        status, _ = await post(serving.transport, "/v1/embeddings", {"input": "paris"})
        assert status == 200
        assert not large.done()
        status, reply = await large
        assert (status, len(reply["data"])) == (200, 300)

    serving.runner.run(ask())


def test_rankings_go_to_the_cross_encoder_if_there_is_one(serving: Serving) -> None:
    body = {"query": "cat", "documents": ["dog", "the cat purrs"]}

    async def ask() -> None:
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            status, reply = await post(serving.transport, path, body)
            assert (status, reply["model"]) == (200, "my-rerank")
        status, reply = await post(serving.transport, "/v1/score", {"text_1": "cat", "text_2": "dog"})
        assert (status, reply["model"]) == (200, "my-rerank")
        status, reply = await post(serving.transport, "/v1/rerank", body | {"model": "my-embeddings"})
        assert (status, reply["model"]) == (200, "my-embeddings")
        status, reply = await post(serving.transport, "/v1/rerank", body | {"top_n": 0})
        assert (status, reply["error"]["param"]) == (400, "top_n")

    serving.runner.run(ask())
