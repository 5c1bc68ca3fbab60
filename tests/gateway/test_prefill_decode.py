"""Prefill and decode in different processes, behind the gateway: the answers of one engine, also when processes are killed.

`python -m benchmarks.prefill_decode` does the same with more requests, and with `tonle gateway` as a process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.checkpoints import save_folder
from tests.fakes.prefill_decode import (
    COMPLETIONS,
    KINDS,
    Fleet,
    Outcome,
    ask_all,
    fleet,
    metric,
    requests,
    wait_until_nothing_is_held,
)
from tests.fakes.server import Server
from tests.gateway.running_gateway import KEY, RunningGateway, run, running_gateway, until
from tonle.config.routing import BackendConfig

KEYED = {"authorization": f"Bearer {KEY}"}
SOURCE = "prefill server"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_folder("llama", folder)
    with fleet(folder) as found:
        yield found


def behind(folder: Path, servers: Fleet) -> Any:
    rows = tuple(
        BackendConfig(url=server.url, name=f"{role}{index}", role=role)  # type: ignore[arg-type]
        for role in KINDS
        for index, server in enumerate(servers.servers[role])
    )
    return running_gateway(folder, backends=lambda: rows, cache=None, prefill_threshold=20, retries=3)


async def of_one_engine(servers: Fleet, bodies: list[dict[str, Any]]) -> list[Outcome]:
    """The same requests to one of the servers alone, under a salt of their own: they share no prefix with others."""
    server = servers.servers["decode"][1]
    outcomes, task = await ask_all(server.url, bodies, headers={"x-tonle-salt": "alone"}, at_once=8)
    await task
    assert not any(outcome.problem for outcome in outcomes)
    return outcomes


def check(expected: Outcome, got: Outcome) -> None:
    assert got.text == expected.text
    for name in ("prompt_tokens", "completion_tokens"):
        assert got.usage[name] == expected.usage[name]


def test_answers_are_those_of_one_engine(tmp_path: Path, servers: Fleet) -> None:
    bodies = requests(40, seed=1)

    async def main() -> None:
        expected = await of_one_engine(servers, bodies)
        async with behind(tmp_path, servers) as place:
            outcomes, task = await ask_all(place.url, bodies, headers=KEYED, at_once=8)
            await task
        for one, other in zip(expected, outcomes, strict=True):
            assert not other.problem, other.problem
            check(one, other)
        records = place.records()
        assert len(records) == len(bodies)
        legs = [record["route"].get("prefill") for record in records]
        assert {"prefill0", "prefill1"} <= set(legs), "both prefill servers had work"
        for server in servers.alive:
            await wait_until_nothing_is_held(server)
        fetched = sum([await metric(s, "tonle:kv_loads", source=SOURCE, result="loaded") for s in servers.alive])
        failed = sum([await metric(s, "tonle:kv_loads", source=SOURCE, result="failed") for s in servers.alive])
        ended = [await metric(s, "tonle:kv_leases_ended", how="fetched") for s in servers.servers["prefill"]]
        granted = [await metric(s, "tonle:kv_leases_granted") for s in servers.servers["prefill"]]
        assert fetched > 10 and failed == 0
        assert ended == granted and sum(granted) == sum(leg is not None for leg in legs)

    run(main())


def test_a_prompt_that_cannot_be_fetched_is_computed_and_its_lease_ends(servers: Fleet) -> None:
    prefill, decode = (servers.servers[role][1] for role in KINDS)
    body = {"model": "m", "prompt": "a prompt that nobody has computed yet " * 8, "max_tokens": 8, "temperature": 0}

    async def main() -> None:
        async with httpx.AsyncClient(timeout=120) as client:

            async def complete(server: Server, salt: str, **fields: Any) -> Any:
                headers = {"x-tonle-salt": salt}
                reply = await client.post(f"{server.url}{COMPLETIONS}", json=body | fields, headers=headers)
                assert reply.status_code == 200, reply.text
                return reply.json()

            expected = (await complete(decode, "alone"))["choices"]
            first = await complete(prefill, "t", max_tokens=1, kv_transfer_params={"do_remote_decode": True})
            assert "warnings" not in first and first["usage"]["completion_tokens"] == 1
            params = first["kv_transfer_params"]
            assert await metric(prefill, "tonle:kv_leased_blocks") == len(params["remote_block_ids"]) > 0
            before = await metric(decode, "tonle:kv_loads", result="failed")
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                params["remote_port"] = unused.getsockname()[1]
                got = await complete(decode, "t", kv_transfer_params=params)
            assert got["choices"] == expected
            assert await metric(decode, "tonle:kv_loads", result="failed") == before + 1
        await wait_until_nothing_is_held(prefill)
        assert await metric(prefill, "tonle:kv_leases_ended", how="expired") == 1

    run(main())


def test_killed_processes_lose_nothing_that_had_not_begun(tmp_path: Path, servers: Fleet) -> None:
    bodies = requests(40, seed=2)

    async def main() -> None:
        expected = await of_one_engine(servers, bodies)
        async with behind(tmp_path, servers) as place:
            outcomes, task = await ask_all(place.url, bodies, headers=KEYED, at_once=8)
            await killing(place, servers, outcomes)
            await task
        for one, other in zip(expected, outcomes, strict=True):
            if other.problem:
                assert other.begun, other.problem
                assert one.text.startswith(other.text)
            else:
                check(one, other)
        assert len(place.records()) == len(bodies)
        for server in servers.alive:
            await wait_until_nothing_is_held(server)

    run(main())


async def killing(place: RunningGateway, servers: Fleet, outcomes: list[Outcome]) -> None:
    """One of each kind, each while it has work."""
    for number, role in enumerate(KINDS, start=1):
        victim = place.gateway.pool.named(f"{role}0")
        before = victim.num_sent
        await until(lambda v=victim, b=before: v.num_sent > b, "the victim has nothing to do")  # type: ignore[misc]
        servers.kill(role)
        enough = number * len(outcomes) // 4
        await until(lambda e=enough: sum(bool(o.text) for o in outcomes) >= e, "the others do not go on")  # type: ignore[misc]
    await asyncio.sleep(0)
