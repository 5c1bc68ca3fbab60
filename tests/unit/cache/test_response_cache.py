"""Answers that are kept: for how long, how many, and for whom."""

from __future__ import annotations

import asyncio

import pytest

from tonle.cache import CachedResponse, Flight, ResponseCache, cache_key, may_reuse
from tonle.cache.response_cache import MAX_BYTES, MAX_SIZE
from tonle.config import values
from tonle.config.gateway import SETTINGS
from tonle.errors import ConfigError


def answer(text: str = "x") -> CachedResponse:
    return CachedResponse(body=text.encode(), content_type="text/plain", stream=False, request_id="r")


def key(**changes: object) -> bytes:
    facts = {"tenant": "t", "path": "/v1/chat/completions", "model": ("m", None),
             "body": {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}}  # fmt: skip
    return cache_key(**(facts | changes))  # type: ignore[arg-type]


def test_the_least_recently_used_goes_first() -> None:
    cache = ResponseCache(max_size=2)
    cache.put(b"a", answer())
    cache.put(b"b", answer())
    assert cache.get(b"a") is not None
    cache.put(b"c", answer())
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None and cache.get(b"c") is not None
    assert cache.num_entries == 2


def test_all_goes_after_a_while() -> None:
    now_s = 0.0
    cache = ResponseCache(ttl_seconds=10, clock=lambda: now_s)
    cache.put(b"a", answer())
    now_s = 9.9
    assert cache.get(b"a") is not None
    now_s = 10.0
    assert cache.get(b"a") is None
    assert (cache.num_entries, cache.num_bytes) == (0, 0)


def test_memory_is_bounded_and_counted() -> None:
    cache = ResponseCache(max_bytes=1000)
    for index in range(100):
        cache.put(bytes([index]), answer("y" * 90))
    assert cache.num_bytes == 90 * cache.num_entries <= 1000
    cache.put(b"huge", answer("z" * 101))
    assert cache.get(b"huge") is None
    cache.put(b"\x63", answer("w"))
    assert cache.num_bytes == 90 * (cache.num_entries - 1) + 1
    assert asyncio.run(cache.clear()) > 0 and cache.num_bytes == 0


def test_hit_rate() -> None:
    cache = ResponseCache()
    assert cache.stats.hit_rate == 0
    cache.get(b"a")
    cache.put(b"a", answer())
    cache.get(b"a")
    assert cache.stats.hit_rate == 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "other"},
        {"path": "/v1/completions"},
        {"model": ("m", "adapter")},
        {"body": {"messages": [{"role": "user", "content": "ho"}], "temperature": 0}},
        {"body": {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 5}},
        {"body": {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "stream": True}},
        {"body": {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "response_format": {"a": 1}}},
        {"body": {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "field_of_tomorrow": 1}},
    ],
)
def test_whatever_may_change_the_answer_changes_the_key(changes: dict[str, object]) -> None:
    assert key(**changes) != key()


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
TURNED = {"type": "object", "properties": {"age": {"type": "integer"}, "name": {"type": "string"}}}
NEW_FIELDS: dict[str, tuple[object, object]] = {
    "tools": ([{"function": {"name": "f", "parameters": SCHEMA}}], [{"function": {"name": "g", "parameters": SCHEMA}}]),
    "tool_choice": ("auto", "required"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    "structured_outputs": ({"json": SCHEMA}, {"json": {**SCHEMA, "required": ["age"]}}),
    "guided_json": (SCHEMA, {"type": "string"}),
    "regex": ("a+", "a*"),
    "ebnf": ("root ::= 'a'", "root ::= 'b'"),
    "reasoning_effort": ("low", "high"),
    "chat_template_kwargs": ({"enable_thinking": True}, {"enable_thinking": False}),
    "thinking_token_budget": (10, 20),
    # An answer has its properties in the order of its schema.
    "json_schema": (SCHEMA, TURNED),
}


@pytest.mark.parametrize("field", NEW_FIELDS)
def test_an_answer_is_never_replayed_for_another_schema_or_other_tools(field: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    one, other = NEW_FIELDS[field]
    assert len({key(body=body), key(body=body | {field: one}), key(body=body | {field: other})}) == 3
    assert key(body={field: one} | body) == key(body=body | {field: one})


def test_who_asks_and_in_which_order_does_not() -> None:
    body = {"user": "u", "temperature": 0, "use_cache": True, "messages": [{"content": "hi", "role": "user"}]}
    assert key(body=body) == key()


@pytest.mark.parametrize(
    ("body", "reusable"),
    [({"temperature": 0}, True), ({"temperature": 0.0}, True), ({"seed": 3}, True), ({"do_sample": False}, True),
     ({}, False), ({"temperature": 0.1}, False), ({"temperature": False}, False), ({"temperature": "0"}, False)],
)  # fmt: skip
def test_only_what_comes_out_the_same_is_reused(body: dict[str, object], *, reusable: bool) -> None:
    assert may_reuse(body) is reusable


def test_followers_get_the_leaders_answer() -> None:
    async def main() -> None:
        cache = ResponseCache()
        flight = await cache.find(b"a")
        assert isinstance(flight, Flight)
        waiting = [asyncio.create_task(cache.find(b"a")) for _ in range(3)]
        await asyncio.sleep(0)
        flight.land(answer("done"))
        flight.land(None)
        assert [found.body for found in await asyncio.gather(*waiting) if isinstance(found, CachedResponse)] == [
            b"done"
        ] * 3
        assert (cache.stats.hits, cache.stats.misses, cache.stats.shared) == (3, 1, 3)
        assert cache.get(b"a") is not None

    asyncio.run(main())


def test_a_leader_that_fails_leaves_nothing() -> None:
    async def main() -> None:
        cache = ResponseCache()
        flight = await cache.find(b"a")
        assert isinstance(flight, Flight)
        follower = asyncio.create_task(cache.find(b"a"))
        await asyncio.sleep(0)
        flight.land(None)
        second = await follower
        assert isinstance(second, Flight) and second is not flight  # the follower computes it
        assert cache.get(b"a") is None

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [{"max_size": 0}, {"ttl_seconds": 0}, {"max_bytes": -1}])
def test_senseless_sizes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ResponseCache(**wrong)  # type: ignore[arg-type]


def test_the_settings_show_the_limits_that_hold_without_them() -> None:
    assert SETTINGS["cache_max_size"].type.show(None) == str(MAX_SIZE)
    assert SETTINGS["cache_max"].type.show(None) == values.show_size(MAX_BYTES)
