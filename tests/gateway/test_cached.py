"""The response cache as callers meet it: for whom, for what, and together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.gateway.running_gateway import ADMIN, KEY, Upstream, run, running_gateway, until


def test_two_tenants_never_share_an_answer_or_a_salt(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m", owned_by="vllm")
        async with running_gateway(tmp_path, upstream) as place:
            mine = await place.ask(temperature=0, key=KEY)
            theirs = await place.ask(temperature=0, key=ADMIN)
            assert (mine.headers["x-cache"], theirs.headers["x-cache"]) == ("miss", "miss")
            assert (await place.ask(temperature=0, key=KEY)).headers["x-cache"] == "hit"
        first, second = upstream.requests
        assert first["cache_salt"] != second["cache_salt"]

    run(main())


def test_keys_of_one_tenant_share(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            wish = {"name": "x", "tenant": "team"}
            one, two = [(await place.post("/admin/keys", wish)).json()["key"] for _ in range(2)]
            assert (await place.ask(temperature=0, key=one)).headers["x-cache"] == "miss"
            assert (await place.ask(temperature=0, key=two)).headers["x-cache"] == "hit"

    run(main())


@pytest.mark.parametrize(
    ("fields", "headers", "states"),
    [
        ({}, {}, ["bypass", "bypass"]),
        ({"temperature": 0.7}, {}, ["bypass", "bypass"]),
        ({"seed": 4}, {}, ["miss", "hit"]),
        ({"use_cache": True}, {}, ["miss", "hit"]),
        ({"temperature": 0, "use_cache": False}, {}, ["bypass", "bypass"]),
        ({"temperature": 0}, {"cache-control": "no-cache"}, ["bypass", "bypass"]),
        ({}, {"x-use-cache": "true"}, ["miss", "hit"]),
    ],
)
def test_what_is_cached(tmp_path: Path, fields: dict[str, object], headers: dict[str, str], states: list[str]) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            replies = [await place.ask(headers=headers, **fields) for _ in range(2)]
            assert [reply.headers["x-cache"] for reply in replies] == states
            assert replies[0].json()["choices"] == replies[1].json()["choices"]
            assert all("use_cache" not in body for body in upstream.requests)

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_identical_requests_at_once_are_computed_once(tmp_path: Path, *, stream: bool) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream) as place:
            asking = [asyncio.create_task(place.ask(temperature=0, stream=stream)) for _ in range(8)]
            await until(lambda: place.gateway.server.num_active == 8, "not all came")
            await asyncio.sleep(0.05)
            upstream.hang.set()
            replies = await asyncio.gather(*asking)
            assert len({reply.text for reply in replies}) == 1
            assert sorted(reply.headers["x-cache"] for reply in replies) == ["hit"] * 7 + ["miss"]
            assert len(upstream.requests) == 1
        assert sorted(record["status"] for record in place.records()) == ["cached"] * 7 + ["ok"]

    run(main())


def test_a_leader_who_hangs_up_takes_nobody_along(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream) as place:
            leader = asyncio.create_task(place.ask(temperature=0))
            await until(lambda: upstream.requests, "it never came")
            followers = [asyncio.create_task(place.ask(temperature=0)) for _ in range(3)]
            await until(lambda: place.gateway.server.num_active == 4, "not all came")
            await asyncio.sleep(0.05)
            leader.cancel()
            await until(lambda: len(upstream.requests) == 2, "no follower took over")
            upstream.hang.set()
            replies = await asyncio.gather(*followers)
            assert [reply.status_code for reply in replies] == [200] * 3
            assert len(upstream.requests) == 2

    run(main())


def test_errors_and_broken_streams_are_not_kept(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.status = 400
        async with running_gateway(tmp_path, upstream) as place:
            assert (await place.ask(temperature=0)).status_code == 400
            upstream.status = 200
            upstream.break_after = 1
            await place.ask(temperature=0, stream=True)
            upstream.break_after = None
            assert (await place.ask(temperature=0)).headers["x-cache"] == "miss"
            assert (await place.ask(temperature=0, stream=True)).headers["x-cache"] == "miss"

    run(main())


def test_clearing_needs_an_admin(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            await place.ask(temperature=0)
            assert (await place.post("/cache/clear", key=KEY)).status_code == 403
            assert (await place.post("/cache/clear")).json() == {"status": "cleared", "entries": 1}
            assert (await place.ask(temperature=0)).headers["x-cache"] == "miss"
            metrics = (await place.get("/metrics")).text
            assert "tonle:cache_misses_total 2.0" in metrics and "tonle:cache_hit_rate 0.0" in metrics

    run(main())
