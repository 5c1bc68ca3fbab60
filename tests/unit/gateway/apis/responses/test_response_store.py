"""Stored responses: their time, their owner, their bounds; and the conversations made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.stores import redis_store
from tonle.cache.redis_client import RedisClient
from tonle.errors import InvalidRequest, StoreLost, TooLarge
from tonle.gateway.apis.responses import context
from tonle.gateway.apis.responses.context import Context, ContextFinder, PreviousNotFound, new_id
from tonle.gateway.apis.responses.input_items import read_items
from tonle.gateway.apis.responses.redis_responses import RedisResponses
from tonle.gateway.apis.responses.response_store import Items, MemoryResponses, StoredResponse


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def stored(text: str = "a", chain: tuple[str, ...] = (), context_bytes: int = 0) -> StoredResponse:
    item = msgspec.json.encode(
        [{"type": "message", "role": "user", "id": "x", "content": [{"type": "input_text", "text": text}]}]
    )
    return StoredResponse(b"{}", item, b"[]", chain, context_bytes or len(item) + 2)


def test_a_response_is_kept_for_a_time_after_its_last_use() -> None:
    async def main() -> None:
        clock = Clock()
        store = MemoryResponses(10.0, clock=clock)
        for name in ("used", "listed", "unused"):
            await store.put("o", name, stored(name))
        clock.now_s = 6.0
        assert await store.get("o", "used") == stored("used")
        assert await store.get_items("o", ["listed", "none"]) == [Items(stored("listed").input, b"[]"), None]
        clock.now_s = 10.0
        assert await store.get("o", "unused") is None and store.num_entries == 2
        assert not await store.delete("o", "unused")
        clock.now_s = 15.9
        assert await store.get("o", "listed") is not None
        clock.now_s = 16.0
        assert await store.get("o", "used") is None
        clock.now_s = 30.0
        await store.put("o", "new", stored())
        assert store.num_entries == 1 and store.num_bytes == stored().num_bytes
        assert await store.delete("o", "new") and store.num_entries == store.num_bytes == 0

    asyncio.run(main())


def test_bounds_hold_and_the_longest_unused_goes() -> None:
    async def main() -> None:
        store = MemoryResponses(10.0, max_size=3)
        for name in "abc":
            await store.put("o", name, stored())
        await store.get("o", "a")
        await store.put("o", "d", stored())
        assert [await store.get("o", name) is not None for name in "abcd"] == [True, False, True, True]
        await store.put("o", "d", stored("again"))
        assert store.num_entries == 3
        size = stored("x" * 1000).num_bytes
        store = MemoryResponses(10.0, max_bytes=12 * size)
        for number in range(30):
            await store.put("o", str(number), stored("x" * 1000))
            assert store.num_bytes <= 12 * size
        assert store.num_entries == 12 and await store.get("o", "29") is not None
        with pytest.raises(TooLarge, match="more than a tenth of response_store_max"):
            await store.put("o", "large", stored("x" * 2000))

    asyncio.run(main())


def test_one_owner_cannot_push_out_the_others() -> None:
    async def main() -> None:
        store = MemoryResponses(10.0, max_size=10)
        for number in range(4):
            await store.put("quiet", str(number), stored())
        for number in range(50):
            await store.put("busy", str(number), stored())
        assert [await store.get("quiet", str(number)) is not None for number in range(4)] == [True] * 4
        assert store.num_entries == 10 and await store.get("busy", "49") is not None
        assert await store.get("quiet", "49") is None, "an id of another owner"

    asyncio.run(main())


class Places:
    """A store of one owner, and a finder for it."""

    def __init__(self, *, max_bytes: int = 10**6) -> None:
        self.store = MemoryResponses(100.0)
        self.reserved: list[int] = []
        self.finder = ContextFinder(self.store, "o", max_bytes, self.reserved.append)

    async def grow(self, count: int) -> list[str]:
        """A conversation of so many responses."""
        ids: list[str] = []
        num_bytes = 0
        for number in range(count):
            one = stored(f"q{number}")
            num_bytes += one.context_bytes
            ids.append(f"resp_{new_id()}")
            await self.store.put("o", ids[-1], stored(f"q{number}", tuple(ids[:-1]), num_bytes))
        return ids


def texts(found: Context) -> list[str]:
    return [item["content"][0]["text"] for item in found.items]


def test_a_chain_is_found_whole_and_in_order() -> None:
    async def main() -> None:
        places = Places()
        ids = await places.grow(5)
        found = await places.finder.previous(ids[-1])
        assert texts(found) == ["q0", "q1", "q2", "q3", "q4"] and found.chain == tuple(ids)
        assert places.reserved == [found.num_bytes]
        assert texts(await places.finder.previous(ids[1])) == ["q0", "q1"], "it branches"
        await places.store.delete("o", ids[2])
        with pytest.raises(PreviousNotFound, match=f"it continues {ids[2]}, which was deleted or has expired"):
            await places.finder.previous(ids[-1])

    asyncio.run(main())


def test_a_chain_is_followed_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MAX_CHAIN", 4)

    async def main() -> None:
        places = Places(max_bytes=300)
        ids = await places.grow(6)
        with pytest.raises(InvalidRequest, match="has 4 responses, and more are not followed"):
            await places.finder.previous(ids[4])
        with pytest.raises(InvalidRequest, match=r"bytes, more than max_body \(300\)"):
            await places.finder.previous(ids[3])
        assert not places.reserved
        for odd in ("", "x", "resp_", "resp_" + "0" * 48, ids[0] + "\0"):
            with pytest.raises(PreviousNotFound, match="there is no response"):
                await places.finder.previous(odd)
        nowhere = ContextFinder(None, "o", 10, places.reserved.append)
        with pytest.raises(InvalidRequest, match="this server stores no responses, because it has several front ends"):
            await nowhere.previous(ids[0])
        with pytest.raises(InvalidRequest, match="an item_reference cannot be served: this server stores no responses"):
            await nowhere.with_referred(read_items([{"id": "msg_1"}], "x"))

    asyncio.run(main())


def test_references_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MAX_REFERRED", 3)

    async def main() -> None:
        places = Places()
        given: list[Any] = []
        for _ in range(4):
            part = new_id()
            item: dict[str, Any] = {"type": "message", "role": "user", "id": f"msg_{part}_in0", "content": []}
            await places.store.put(
                "o", f"resp_{part}", StoredResponse(b"{}", msgspec.json.encode([item]), b"[]", (), 1)
            )
            given.append({"type": "item_reference", "id": item["id"]})
        found = await places.finder.with_referred([*given[:3], given[0]])
        assert [item["id"] for item in found] == [each["id"] for each in (*given[:3], given[0])]
        with pytest.raises(InvalidRequest, match="items of too many responses"):
            await places.finder.with_referred(given)
        small = ContextFinder(places.store, "o", 20, places.reserved.append)
        with pytest.raises(InvalidRequest, match="items of too many responses"):
            await small.with_referred(given[:1])

    asyncio.run(main())


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with redis_store(tmp_path / "redis") as store:
        yield store.url


def test_in_redis(redis_url: str) -> None:
    async def main() -> None:
        one = RedisResponses(RedisClient(redis_url, timeout_s=5, param="response_store"), 60.0)
        other = RedisResponses(RedisClient(redis_url, timeout_s=5, param="response_store"), 0.05)
        response = stored("a", ("resp_1",), 77)
        await one.put("o", "r1", response)
        assert await other.get("p", "r1") is None and await one.get("", "or1") is None
        assert await one.get("o", "r1") == response
        assert await one.get_items("o", ["r2", "r1"]) == [None, Items(response.input, response.output)]
        redis = one._client.redis
        (key,) = await redis.keys("*")
        assert key.startswith(b"tonle:responses:") and 50_000 < await redis.pttl(key) <= 60_000
        with pytest.raises(TooLarge, match="at most 8388608 are stored in Redis"):
            await one.put("o", "large", stored("x" * 9 * 1024**2))
        await other.put("o", "short", response)
        for _ in range(6000):
            if await one.get("p", "x") is None and not await redis.exists("x") and len(await redis.keys("*")) == 1:
                break
            await asyncio.sleep(0.02)
        assert await redis.keys("*") == [key], "its time has passed"
        assert await one.delete("o", "r1") and not await one.delete("o", "r1")
        await one.close()
        await other.close()

    asyncio.run(main())


def test_a_redis_that_is_gone() -> None:
    async def main() -> None:
        store = RedisResponses(RedisClient("redis://127.0.0.1:1/0", timeout_s=1, param="response_store"), 60.0)
        for attempt in (
            store.get("o", "r"),
            store.get_items("o", ["r"]),
            store.put("o", "r", stored()),
            store.delete("o", "r"),
        ):
            with pytest.raises(StoreLost):
                await attempt
        await store.close()

    asyncio.run(main())
