"""Pools as a backend: which pool answers, what is listed, errors and timeouts as the gateway expects them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.workers.pools import SCRIPTED, run, until
from tests.workers.replies import Reply, ask
from tonle.edge.client import UpstreamError
from tonle.edge.client_connection import Sink
from tonle.errors import ConfigError
from tonle.workers import builtin
from tonle.workers.builtin import BUILTIN, BuiltinKind, kind_path
from tonle.workers.import_path import load_object
from tonle.workers.pool import WorkerPool
from tonle.workers.pool_config import PoolConfig
from tonle.workers.transport import WorkersTransport
from tonle.workers.worker_request import WorkerRequest


async def echo(request: WorkerRequest, pool: WorkerPool, sink: Sink) -> None:
    sink.head(200, {"content-type": "text/plain"})
    sink.data(f"{pool.name} {request.path} {request.header('x-some')}".encode())


@contextlib.asynccontextmanager
async def serving(*configs: PoolConfig) -> AsyncIterator[WorkersTransport]:
    pools = [WorkerPool(config) for config in configs]
    await asyncio.gather(*(pool.start() for pool in pools))
    try:
        yield WorkersTransport(pools)
    finally:
        await asyncio.gather(*(pool.stop() for pool in pools))


def form(**fields: str) -> tuple[bytes, dict[str, str]]:
    parts = [f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields.items()]
    return "".join([*parts, "--x--\r\n"]).encode(), {"content-type": "multipart/form-data; boundary=x"}


def test_the_path_and_the_model_choose_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    here = BuiltinKind(kind=SCRIPTED, handlers={"/v1/echo": "tests.workers.test_transport:echo"})
    monkeypatch.setitem(builtin.BUILTIN, "echo", here)

    async def steps() -> None:
        first = PoolConfig(kind="echo", name="first", served_name="model-a", min_instances=0)
        second = PoolConfig(kind="echo", name="second", served_name="model-b", min_instances=0)
        async with serving(first, second) as transport:
            headers = {"content-type": "application/json", "X-Some": "value"}

            async def text(body: object, headers: dict[str, str] = headers) -> str:
                return b"".join((await ask(transport, "POST", "/v1/echo", body, headers=headers)).pieces).decode()

            assert await text({"model": "model-b"}) == "second /v1/echo value"
            assert await text({"model": "model-a"}) == "first /v1/echo value"
            assert await text({}) == await text({"model": None}) == await text(b"not JSON") == "first /v1/echo value"
            assert await text(*form(language="km", model="model-b")) == "second /v1/echo "
            assert await text(*form(language="km")) == "first /v1/echo "

            reply = await ask(transport, "POST", "/v1/echo", {"model": "model-c"})
            assert reply.status == 404 and reply.json["error"]["code"] == "model_not_found"
            assert "model-a, model-b" in reply.json["error"]["message"]
            reply = await ask(transport, "POST", "/v1/echo", b"", headers=form()[1])
            assert reply.status == 400 and "empty" in reply.json["error"]["message"]
            for method, path in (("POST", "/v1/other"), ("GET", "/v1/echo"), ("GET", "/v1/models/model-c")):
                assert (await ask(transport, method, path)).status == 404

            models = (await ask(transport, "GET", "/v1/models")).json["data"]
            assert [(model["id"], model["kind"]) for model in models] == [("model-a", "echo"), ("model-b", "echo")]
            assert (await ask(transport, "GET", "/v1/models/model-b")).json["id"] == "model-b"
            assert list(transport.models()) == ["model-a", "model-b"] and transport.paths == ["/v1/echo"]
            transport.close()

    run(steps())


def test_a_kind_of_ones_own_over_http(tmp_path: Path) -> None:
    async def steps() -> None:
        async with serving(PoolConfig(kind=SCRIPTED, name="mine", max_wait_ms=0)) as transport:
            (pool,), path = transport.pools, "/v1/workers/mine"
            unready = await ask(transport, "GET", "/health/ready")
            assert unready.status == 503 and unready.json["pool"] == "mine"
            assert (await ask(transport, "GET", "/health")).json["pools"][0][
                "reason"
            ] == "its model is still being loaded"
            reply = await ask(transport, "POST", path, {"name": "early", "model": "whatever"})
            assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
            assert reply.json["name"] == "early"
            assert (await ask(transport, "GET", "/health/ready")).json == {"status": "ready"}
            health = (await ask(transport, "GET", "/health")).json
            assert health["status"] == "healthy" and health["pools"][0]["instances_ready"] == 1
            assert (await ask(transport, "GET", "/v1/models")).json["data"][0]["facts"]["device"] == "cpu"

            media = [os.urandom(10), os.urandom(10_000)]
            body = {"reverse": True, "media": [base64.b64encode(one).decode() for one in media], "size": 3}
            found = (await ask(transport, "POST", path, body)).json["media"]
            assert [base64.b64decode(one) for one in found] == [one[::-1] for one in media]
            wrong: list[tuple[dict[str, Any], str]] = [
                ({"media": "x"}, "media"),
                ({"media": ["é"]}, "media"),
                ({"size": 0}, "size"),
            ]
            for asked, param in wrong:
                reply = await ask(transport, "POST", path, asked)
                assert reply.status == 400 and reply.json["error"]["param"] == param
            reply = await ask(transport, "POST", path, {"do": "refuse"})
            assert (reply.status, reply.json["error"]["message"]) == (400, "not like this")
            reply = await ask(transport, "POST", path, {"do": "busy"})
            assert (reply.status, reply.headers["retry-after"]) == (503, "7")

            reply = await ask(transport, "POST", path, {"stream": True, "pieces": 2})
            events = [msgspec.json.decode(piece[6:]) for piece in reply.pieces[:-1]]
            assert [event["number"] for event in events] == [0, 1] and reply.pieces[-1] == b"data: [DONE]\n\n"
            assert (await ask(transport, "POST", path, {"stream": True, "pieces": 0})).pieces == [b"data: [DONE]\n\n"]
            await check_cut_off(transport, path, pool, tmp_path)

    run(steps())


async def check_cut_off(transport: WorkersTransport, path: str, pool: WorkerPool, folder: Path) -> None:
    """After the first piece an error has no reply; a slow caller is waited for; what takes too long is told apart."""
    reply = Reply()
    with pytest.raises(UpstreamError) as cut:
        await ask(transport, "POST", path, {"stream": True, "pieces": 3, "do": "raise", "at": 1}, reply=reply)
    assert cut.value.began and not cut.value.timed_out and len(reply.pieces) == 1
    reply = await ask(transport, "POST", path, {"stream": True, "pieces": 3, "do": "raise", "at": 0})
    assert reply.status == 500

    flag = folder / "flag"
    with pytest.raises(UpstreamError) as late:
        await ask(transport, "POST", path, {"do": "wait", "flag": str(flag)}, first_s=0.05)
    assert late.value.timed_out and not late.value.began
    flag.touch()
    await until(lambda: not pool.num_running)

    closed, slow = folder / "closed", Reply()
    slow.is_slow = True
    body = {"stream": True, "pieces": 10**9, "do": "endless", "closed": str(closed)}
    task = asyncio.create_task(ask(transport, "POST", path, body, silence_s=600, reply=slow))
    await until(lambda: len(slow.pieces) == 1)
    await until(lambda: len(pool._instances[0].jobs[0]._pieces) > 3)  # type: ignore[attr-defined]
    assert len(slow.pieces) == 1
    slow.press(False)
    await until(lambda: len(slow.pieces) == 2)
    task.cancel()
    await until(closed.exists)

    with pytest.raises(UpstreamError) as silent:
        await ask(transport, "POST", path, {"stream": True, "pieces": 2, "do": "hang", "at": 1}, silence_s=0.05)
    assert silent.value.timed_out and silent.value.began


def test_every_kind_that_comes_with_tonle_is_named_as_the_table_of_the_document_has_it() -> None:
    text = (Path(__file__).parents[2] / "docs" / "workers.md").read_text()
    for name, found in BUILTIN.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` | "))
        assert f"`POST {next(iter(found.handlers))}`" in row
        assert kind_path(name) == found.kind


def test_what_an_import_path_names() -> None:
    assert load_object("json:dumps") is json.dumps
    names: list[Any] = ["nothing", "json:", "a-b:c d"]
    for name in names:
        with pytest.raises(ConfigError, match=r"package\.module:Class"):
            kind_path(name)
