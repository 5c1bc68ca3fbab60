"""An engine whose evicted blocks come back: the same tokens and log-probabilities, to the last bit, from every tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import tiny_model
from tests.fakes.stores import redis_store
from tonle.engine import EngineConfig, GenerationConfig, InferenceEngine
from tonle.engine.inference_engine import InferenceEngine as Engine
from tonle.engine.messages import Cancel

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # keys and values, layers, tokens, heads, their size, float32
NUM_BLOCKS = 12  # on the device
GREEDY = GenerationConfig(max_length=4, do_sample=False, early_stopping=False, logprobs=3)
PROMPT = list(range(3, 103))  # 100 tokens: 6 whole blocks of 16
OTHERS = [[number, *range(3, 100)] for number in range(200, 206)]  # they fill the device several times


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_store(tmp_path_factory.mktemp("redis")) as store:
        yield store.url


def opened(model: Any, **settings: Any) -> Engine:
    return InferenceEngine(model, None, EngineConfig(memory_pool_size=NUM_BLOCKS * BLOCK_BYTES, **settings))


def ask(engine: Engine, prompt: list[int] = PROMPT) -> Any:
    return engine.result(engine.submit_request(prompt, GREEDY), timeout=60)


def evict(engine: Engine) -> None:
    for other in OTHERS:
        ask(engine, other)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def counts(engine: Engine, tier: str) -> dict[str, Any]:
    found: dict[str, Any] = engine.get_stats()["kv_tiers"][tier]
    return found


def until_counted(engine: Engine, condition: Callable[[], bool]) -> None:
    """An engine without work says nothing of what its threads do meanwhile, but with each message it gets."""

    def holds() -> bool:
        assert engine._mailbox is not None
        engine._mailbox.put(Cancel([]))
        return condition()

    until(holds)


def said(result: Any) -> tuple[Any, Any]:
    return result.output_ids, result.logprobs


@pytest.fixture(scope="module")
def computed(model: Any) -> tuple[Any, Any]:
    """Cold; and from the prefix cache of the device, which everything that comes back must equal to the last bit."""
    with opened(model) as engine:
        cold, cached = ask(engine), ask(engine)
        assert cached.usage.cached_tokens == 96
        evict(engine)
        assert ask(engine).usage.cached_tokens == 0
    return said(cold), said(cached)


def settings_of(tier: str, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    if tier == "redis":
        return {"kv_offload_redis": request.getfixturevalue("redis_url")}
    return {"kv_offload_memory": 100 * BLOCK_BYTES} if tier == "memory" else {"kv_offload_dir": str(tmp_path)}


@pytest.mark.parametrize("tier", ["memory", "disk", "redis"])
def test_what_was_evicted_comes_back(
    model: Any, computed: tuple[Any, Any], tier: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with opened(model, **settings_of(tier, tmp_path, request)) as engine:
        assert said(ask(engine)) == computed[0]
        evict(engine)
        until_counted(engine, lambda: counts(engine, tier)["save_bytes"] >= 6 * BLOCK_BYTES)
        again = ask(engine)
        assert again.usage.cached_tokens == 96
        assert said(again) == computed[1]
        assert again.output_ids == computed[0][0]
        found = counts(engine, tier)
        assert found["hits"] >= 6 and found["load_bytes"] == found["hits"] * BLOCK_BYTES and found["load_s"] > 0


@pytest.mark.parametrize("tier", ["disk", "redis"])
def test_another_engine_finds_it(
    model: Any, computed: tuple[Any, Any], tier: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """After a restart, or beside the first; but not one with another model, or another precision."""
    settings = settings_of(tier, tmp_path, request)
    with opened(model, **settings) as first:
        ask(first)
        evict(first)
        until_counted(first, lambda: counts(first, tier)["save_bytes"] >= 6 * BLOCK_BYTES)
        with opened(model, **settings) as second:
            assert said(ask(second)) == computed[1]
            assert counts(second, tier)["hits"] == 6
    with opened(model, **settings) as third:
        assert said(ask(third)) == computed[1]
    with opened(tiny_model("llama", seed=1), **settings) as other:
        assert ask(other).usage.cached_tokens == 0
    with opened(model, kv_cache_dtype="int8", **settings) as other:
        assert ask(other).usage.cached_tokens == 0


def test_memory_overflows_to_disk(model: Any, computed: tuple[Any, Any], tmp_path: Path) -> None:
    with opened(model, kv_offload_memory=8 * BLOCK_BYTES, kv_offload_dir=str(tmp_path)) as engine:
        ask(engine)
        evict(engine)
        until_counted(
            engine, lambda: counts(engine, "disk")["num_blocks"] > 6 and counts(engine, "memory")["num_blocks"] == 8
        )
        again = ask(engine)
        assert said(again) == computed[1] and counts(engine, "disk")["hits"] > 0


def test_damaged_files_are_computed_again(model: Any, computed: tuple[Any, Any], tmp_path: Path) -> None:
    with opened(model, kv_offload_dir=str(tmp_path)) as engine:
        ask(engine)
        evict(engine)
        until_counted(engine, lambda: counts(engine, "disk")["save_bytes"] >= 6 * BLOCK_BYTES)
    for number, path in enumerate(sorted(tmp_path.glob("*/*/*.kv"))):
        data = bytearray(path.read_bytes())
        data[-1 - number] ^= 1
        path.write_bytes(data if number % 2 else data[:-7])
    with opened(model, kv_offload_dir=str(tmp_path)) as engine:
        assert said(ask(engine)) == computed[0]
        assert counts(engine, "disk")["damaged"] == 1 and counts(engine, "disk")["hits"] == 0


def test_memory_that_is_optimized_is_forgotten(model: Any) -> None:
    with opened(model, kv_offload_memory=100 * BLOCK_BYTES) as engine:
        ask(engine)
        evict(engine)
        until_counted(engine, lambda: counts(engine, "memory")["num_blocks"] >= 6)
        engine.optimize_memory()
        assert ask(engine).usage.cached_tokens == 0


def test_a_redis_that_is_gone_costs_nothing_but_its_blocks(model: Any, computed: tuple[Any, Any]) -> None:
    with opened(model, kv_offload_redis="redis://127.0.0.1:9/0") as engine:
        assert said(ask(engine)) == computed[0]
        evict(engine)
        assert said(ask(engine)) == computed[0]
        assert counts(engine, "redis")["errors"] >= 1
