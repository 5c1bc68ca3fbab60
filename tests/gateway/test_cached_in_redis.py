"""Cached answers that several gateways share, in a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.fakes.stores import Store
from tests.gateway.running_gateway import ADMIN, KEY, RunningGateway, Upstream, rows, run, running_gateway, until
from tonle.config.gateway import GatewayConfig
from tonle.config.routing import BackendConfig
from tonle.errors import ConfigError


@contextlib.asynccontextmanager
async def two(
    folder: Path, redis: Store, upstream: Upstream, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, RunningGateway]]:
    """Each with keys of its own in a file: only the cache is shared."""
    settings = {"cache": redis.url, "store_timeout_s": 120.0, **settings}
    for name in ("one", "two"):
        (folder / name).mkdir(exist_ok=True)
    async with running_gateway(folder / "one", upstream, **settings) as one, \
            running_gateway(folder / "two", backends=lambda: rows(upstream), **settings) as other:  # fmt: skip
        yield one, other


async def stored(place: RunningGateway) -> None:
    """Answers are written after the reply; wait for that."""
    await asyncio.gather(*place.gateway._cache._writes)  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_found_by_the_other_gateway(tmp_path: Path, redis: Store, *, stream: bool) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with two(tmp_path, redis, upstream) as (one, other):
            first = await one.ask(temperature=0, stream=stream)
            await stored(one)
            again = await other.ask(temperature=0, stream=stream)
            assert (first.headers["x-cache"], again.headers["x-cache"]) == ("miss", "hit")
            assert again.text == first.text and again.headers["content-type"] == first.headers["content-type"]
            assert len(upstream.requests) == 1
            # Another tenant's identical question finds nothing.
            assert (await other.ask(temperature=0, stream=stream, key=ADMIN)).headers["x-cache"] == "miss"
            assert len(upstream.requests) == 2

    run(main())


def test_identical_requests_at_once_are_computed_once(tmp_path: Path, redis: Store) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with two(tmp_path, redis, upstream) as (one, _):
            asking = [asyncio.create_task(one.ask(temperature=0)) for _ in range(8)]
            await until(lambda: one.gateway.server.num_active == 8 and upstream.requests, "not all came")
            upstream.hang.set()
            replies = await asyncio.gather(*asking)
            assert sorted(reply.headers["x-cache"] for reply in replies) == ["hit"] * 7 + ["miss"]
            assert len(upstream.requests) == 1

    run(main())


def test_a_leader_who_fails_takes_no_follower_along(tmp_path: Path, redis: Store) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with two(tmp_path, redis, upstream) as (one, _):
            leader = asyncio.create_task(one.ask(temperature=0))
            await until(lambda: upstream.requests, "it never came")
            followers = [asyncio.create_task(one.ask(temperature=0)) for _ in range(3)]
            await until(lambda: one.gateway.server.num_active == 4, "not all came")
            leader.cancel()
            await until(lambda: len(upstream.requests) == 2, "no follower took over")
            upstream.hang.set()
            assert [reply.status_code for reply in await asyncio.gather(*followers)] == [200] * 3
            assert len(upstream.requests) == 2

    run(main())


def test_clearing_touches_only_what_is_ours(tmp_path: Path, redis: Store) -> None:
    async def main() -> None:
        async with two(tmp_path, redis, Upstream("m")) as (one, other), Redis.from_url(redis.url) as client:
            await client.set("other:key", "kept")
            for text in ("a", "b", "c"):
                await one.ask(text, temperature=0)
            await stored(one)
            assert (await other.post("/cache/clear")).json() == {"status": "cleared", "entries": 3}
            assert await client.keys("*") == [b"other:key"]
            assert (await one.ask("a", temperature=0)).headers["x-cache"] == "miss"

    run(main())


def test_answers_expire_and_are_not_counted(tmp_path: Path, redis: Store) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with two(tmp_path, redis, upstream, cache_ttl_s=900.0) as (one, _), Redis.from_url(redis.url) as client:
            for text in ("a", "b"):
                await one.ask(text, temperature=0)
            await stored(one)
            left_ms = [await client.pttl(key) for key in await client.keys("*")]
            assert len(left_ms) == 2 and all(0 < left <= 900_000 for left in left_ms)
            metrics = (await one.get("/metrics")).text
            assert "tonle:cache_misses_total 2.0" in metrics and "tonle:cache_entries" not in metrics
            assert (await one.get("/health")).json()["cache"] == {"entries": None, "hit_rate": 0.0}

    run(main())


def test_a_large_answer_is_not_stored(tmp_path: Path, redis: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.cache.redis_cache.MAX_ENTRY_BYTES", 5000)

    async def main() -> None:
        upstream = Upstream("m")
        async with two(tmp_path, redis, upstream) as (one, _):
            for size, states in ((3000, ["miss", "hit"]), (5000, ["miss", "miss"])):
                upstream.words = ["x" * size]
                for state in states:
                    assert (await one.ask(str(size), temperature=0)).headers["x-cache"] == state
                    await stored(one)

    run(main())


@pytest.mark.parametrize(("setting", "name"), [("cache_max_size", "cache_max_size"), ("cache_max_bytes", "cache_max")])
def test_limits_of_the_cache_in_memory_are_refused(setting: str, name: str) -> None:
    backends = (BackendConfig(url="http://127.0.0.1:1"),)
    GatewayConfig(backends=backends, cache="redis://127.0.0.1/0").validate()
    config = GatewayConfig(backends=backends, cache="redis://127.0.0.1/0", **{setting: 10})  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=f"{name} has no effect on a cache in Redis; remove it, and set maxmemory"
    ) as caught:
        config.validate()
    assert caught.value.param == name


def test_a_redis_that_is_full_is_a_miss(tmp_path: Path, redis: Store) -> None:
    async def main() -> None:
        async with two(tmp_path, redis, Upstream("m")) as (one, _), Redis.from_url(redis.url) as client:
            await one.ask("before", temperature=0)
            await stored(one)
            await client.config_set("maxmemory", "1")  # with noeviction, Redis's default: it refuses to write
            for _ in range(2):
                reply = await one.ask("after", temperature=0)
                assert (reply.status_code, reply.headers["x-cache"]) == (200, "miss")
                await stored(one)
            assert (await one.ask("before", temperature=0)).headers["x-cache"] == "hit"
            assert "tonle:cache_errors_total 2.0" in (await one.get("/metrics")).text

    run(main())


def test_an_answer_that_redis_dropped_is_computed_again(tmp_path: Path, redis: Store) -> None:
    async def main() -> None:
        async with two(tmp_path, redis, Upstream("m"), cache_ttl_s=0.05) as (one, _):
            for _ in range(3):
                assert (await one.ask(temperature=0)).headers["x-cache"] == "miss"
                await stored(one)
                await asyncio.sleep(0.1)

    run(main())


def test_a_redis_that_is_gone_is_a_miss(tmp_path: Path, redis: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.cache.redis_cache.PAUSE_S", 0.05)

    async def main() -> None:
        upstream = Upstream("m")
        async with two(tmp_path, redis, upstream) as (one, other):
            await one.ask(temperature=0)
            await stored(one)
            redis.kill()
            for place in (one, other, one):
                reply = await place.ask(temperature=0)
                assert (reply.status_code, reply.headers["x-cache"]) == (200, "miss")
            metrics = (await one.get("/metrics")).text
            assert "tonle:cache_errors_total 0.0" not in metrics and "tonle:cache_errors_total" in metrics
            assert (await one.post("/cache/clear")).status_code == 200
            await redis.start()
            for _ in range(600):
                if (await one.ask(temperature=0)).headers["x-cache"] == "hit":
                    return
                await asyncio.sleep(0.1)
            raise AssertionError("the cache never came back")

    run(main())


def test_a_redis_that_says_nothing_holds_no_request_up(tmp_path: Path, redis: Store) -> None:
    async def main() -> None:
        async with two(tmp_path, redis, Upstream("m"), store_timeout_s=0.2) as (one, _):
            redis.freeze()
            for _ in range(3):
                reply = await one.ask(temperature=0, key=KEY)
                assert (reply.status_code, reply.headers["x-cache"]) == (200, "miss")
            redis.thaw()

    run(main())
