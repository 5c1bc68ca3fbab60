"""The gateway in front of real Tonle replicas: processes, sockets, a small random model.

`python -m benchmarks.two_backends` does the same with the default model, and with vLLM as one of the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import save_folder
from tests.fakes.server import Server, tonle_serve
from tests.gateway.running_gateway import ADMIN, KEY, RunningGateway, run, running_gateway, until
from tonle.config.routing import ArmConfig, BackendConfig, ExperimentConfig

COMPLETIONS = "/v1/completions"
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_folder("llama", folder)
    flags = ("--kv-cache-memory", "64MiB", "--max-num-seqs", "4", "--trust-salt", "--served-model-name", "m")
    with tonle_serve(folder, *flags) as one, tonle_serve(folder, *flags) as two:
        yield [one, two]


@contextlib.asynccontextmanager
async def behind(folder: Path, *replicas: Server, **settings: Any) -> AsyncIterator[RunningGateway]:
    """A gateway in front of them; the first is meant for short prompts only."""

    def rows() -> tuple[BackendConfig, ...]:
        lengths = ("short", "any") if len(replicas) > 1 else ("any",)
        return tuple(
            BackendConfig(url=each.url, name=f"r{index}", length=length)  # type: ignore[arg-type]
            for index, (each, length) in enumerate(zip(replicas, lengths, strict=True))
        )

    async with running_gateway(folder, backends=rows, cache=None, **settings) as place:
        yield place


async def complete(place: RunningGateway, prompt: str, **fields: Any) -> Any:
    return await place.ask(path=COMPLETIONS, prompt=prompt, messages=None, **fields)


def test_tenants_share_no_prefix(tmp_path: Path, replicas: list[Server]) -> None:
    async def main() -> None:
        async with behind(tmp_path, replicas[0]) as place:

            async def cached(key: str) -> int:
                reply = await complete(place, "the quick brown fox " * 20, key=key, max_tokens=1)
                return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

            assert await cached(KEY) == 0
            again = await cached(KEY)
            assert again > 0
            assert await cached(ADMIN) == 0, "another tenant's prompt was found"
            assert await cached(ADMIN) == again
            team = [(await place.post("/admin/keys", {"name": "x", "tenant": "team"})).json()["key"] for _ in range(2)]
            assert [await cached(key) for key in team] == [0, again]
        recorded = [record["usage"]["cached_tokens"] for record in place.records()]
        assert recorded == [0, again, 0, again, 0, again]

    run(main())


def test_length_prefix_and_arms_are_on_record(tmp_path: Path, replicas: list[Server]) -> None:
    arms = (ArmConfig(name="a", weight=1, backend="r0"), ArmConfig(name="b", weight=1, backend="r1"))
    settings = {"experiments": (ExperimentConfig(name="ab", model="public", arms=arms),), "length_threshold": 100,
                "aliases": (("public", "m"),)}  # fmt: skip

    async def main() -> None:
        async with behind(tmp_path, *replicas, **settings) as place:
            for index in range(4):
                assert (await complete(place, f"a question {index % 2}", max_tokens=2)).status_code == 200
            assert (await complete(place, "long " * 120, max_tokens=2)).headers["x-tonle-backend"] == "r1"
            for user in range(12):
                await complete(place, "hello", model="public", user=f"user-{user // 2}", max_tokens=2)
        short, long, ab = (place.records()[start:end] for start, end in ((0, 4), (4, 5), (5, 17)))
        assert {record["route"]["why"] for record in short} == {"prefix"}
        homes = [record["route"]["backend"] for record in short]
        assert homes[:2] == homes[2:]
        assert long[0]["route"] == {"backend": "r1", "model": "m", "why": "length"}
        assert {(each["experiment"]["arm"], each["route"]["backend"]) for each in ab} == {("a", "r0"), ("b", "r1")}
        assert all(one["experiment"] == two["experiment"] for one, two in zip(ab[::2], ab[1::2], strict=True))

    run(main())


def test_a_replica_that_is_killed_takes_nobody_along_who_had_not_begun(tmp_path: Path, replicas: list[Server]) -> None:
    async def main() -> None:
        async with behind(tmp_path, *replicas, prefix_affinity=False) as place:
            begun: set[int] = set()  # streams that have sent something
            streams = [asyncio.create_task(read(place, index, begun)) for index in range(6)]
            wholes = [asyncio.create_task(complete(place, f"whole {index}", **LONG)) for index in range(6)]
            victim = place.gateway.pool.named("r0")
            await until(lambda: victim.gate.num_inside >= 4 and begun, "the victim has nothing to do")
            for pid in (replicas[0].engine_pid(), replicas[0].process.pid):
                os.kill(pid, signal.SIGKILL)
            replies = await asyncio.gather(*wholes)
            assert [reply.status_code for reply in replies] == [200] * 6
            texts = await asyncio.gather(*streams)
            for text in texts:  # cut off in the middle, perhaps; but every answer had begun
                assert '"choices"' in text and text.split("\n\n")[-2].startswith(("data: [DONE]", 'data: {"error"')), (
                    text
                )
        records = place.records()
        assert len(records) == 12
        assert any(record["route"].get("failed") == ["r0"] for record in records)
        assert {record["status"] for record in records} <= {"ok", "failed"}

    run(main())


async def read(place: RunningGateway, index: int, begun: set[int]) -> str:
    body = {"model": "m", "prompt": f"stream {index}", "stream": True, **LONG}
    text = ""
    async with place.client.stream("POST", COMPLETIONS, json=body, headers={"authorization": f"Bearer {KEY}"}) as reply:
        async for piece in reply.aiter_text():
            begun.add(index)
            text += piece
    return text


def test_embeddings_and_rankings(tmp_path: Path, replicas: list[Server]) -> None:
    """Passed on, counted and on record without the vectors; kept by the cache only for those who ask for that."""

    async def main() -> None:
        rows = (BackendConfig(url=replicas[1].url, name="r1"),)  # the first may have been killed by now
        async with running_gateway(tmp_path, backends=lambda: rows) as place:

            async def post(path: str, **body: Any) -> Any:
                reply = await place.client.post(path, json=body, headers={"authorization": f"Bearer {KEY}"})
                assert reply.status_code == 200, reply.text
                return reply

            texts = ["the quick brown fox", "and then the other one"]
            states = []
            for more in ({}, {}, {"use_cache": True}, {"use_cache": True}):
                reply = await post("/v1/embeddings", model="m", input=texts, **more)
                assert [len(each["embedding"]) for each in reply.json()["data"]] == [64, 64]
                states.append(reply.headers.get("x-cache", "none"))
            assert states[0] == states[1] and states[3] != states[2], states
            ranked = await post("/v2/rerank", model="m", query="fox", documents=texts)
            assert sorted(each["index"] for each in ranked.json()["results"]) == [0, 1]
        found = [record for record in place.records() if record["endpoint"] == "/v1/embeddings"]
        assert [record["cache"]["state"] for record in found] == ["bypass", "bypass", "miss", "hit"]
        for record in found:
            assert record["prompt"] == texts and '"num_embeddings": 2' in json.dumps(record)
        assert len(json.dumps(found[0])) < 4000
        assert found[0]["usage"]["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"] > 0

    run(main())
