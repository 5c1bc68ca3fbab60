"""An engine sleeps: memory goes back to the system, requests are refused, and it answers as before when it wakes."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tonle.engine import EngineConfig, GenerationConfig, InferenceEngine
from tonle.engine.front import Front
from tonle.engine.messages import Cancel, ReleaseMemory, Submit
from tonle.engine.process import EngineProcess
from tonle.engine.sleep import Nap, SleepingProcess, check_level
from tonle.engine.text.no_text import NoText
from tonle.errors import ConfigError, EngineDied, InvalidRequest, TonleError
from tonle.models.inputs import KVCache

MIB = 2**20
GREEDY = GenerationConfig(max_length=4, do_sample=False, early_stopping=False)
PROMPT = list(range(3, 103))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def ask(engine: InferenceEngine, prompt: list[int] = PROMPT) -> Any:
    return engine.result(engine.submit_request(prompt, GREEDY), timeout=60)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells how much memory is used this way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_memory_of_a_cache_is_the_systems_again(dtype: torch.dtype) -> None:
    kv = KVCache(num_layers=4, num_blocks=512, block_size=16, num_kv_heads=8, head_dim=64, dtype=dtype,
                 device=torch.device("cpu"))  # fmt: skip
    kv.k.fill_(1)
    kv.v.fill_(1)
    size, full = kv.k.nbytes + kv.v.nbytes, resident_bytes()
    kv.release_memory()
    assert resident_bytes() < full - 0.9 * size
    assert not kv.k[:, 1:-1].any() and not kv.v[:, 1:-1].any()
    kv.k.fill_(2)
    assert bool((kv.k == 2).all())


@pytest.mark.parametrize("level", [1, 2])
def test_it_answers_as_before_when_it_wakes(model: Any, level: int) -> None:
    with InferenceEngine(model, None, EngineConfig(kv_offload_memory=8 * MIB)) as engine:
        first = ask(engine)
        engine.sleep(level)
        engine.sleep(level)  # it does already
        assert engine.is_sleeping
        with pytest.raises(TonleError):
            ask(engine)
        engine.wake_up()
        engine.wake_up()
        assert not engine.is_sleeping
        again, cached = ask(engine), ask(engine)
        assert again.output_ids == cached.output_ids == first.output_ids
        assert (again.usage.cached_tokens, cached.usage.cached_tokens) == (0, 96)


def test_requests_under_way_end(model: Any) -> None:
    with InferenceEngine(model, None, EngineConfig()) as engine:
        long = engine.submit_request(PROMPT, GenerationConfig(max_length=900, do_sample=False, early_stopping=False))
        engine.sleep()
        with pytest.raises(TonleError, match="it sleeps, and must be woken first"):
            engine.result(long, timeout=60)
        engine.wake_up()
        assert ask(engine).output_ids and engine.get_stats()["num_running"] == 0


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_may_be_stopped_while_it_sleeps(model: Any, level: int) -> None:
    with InferenceEngine(model, None, EngineConfig()) as engine:
        engine.sleep(level)
    assert engine.get_stats()["engine_status"] == "stopped" and not engine.is_sleeping
    with pytest.raises(ConfigError, match="only a running engine can sleep"):
        engine.sleep()


@pytest.mark.parametrize(("level", "device", "words"), [(3, "cpu", "level must be 1"), (1, "cuda:0", "use level 2")])
def test_levels_that_cannot_be(level: int, device: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_level(level, device)


def test_what_was_evicted_a_moment_before_is_not_kept_as_zeros(model: Any) -> None:
    config = EngineConfig(block_size=4, kv_cache_max_size=0, kv_offload_memory=MIB, speculation="off")
    own, plain = Driver(model, config), Driver(model, EngineConfig(block_size=4, speculation="off"))
    try:
        tiers = own.loop._outside._tiers
        assert tiers is not None
        long = own.ask(PROMPT, GenerationConfig(max_length=200, do_sample=False, early_stopping=False))
        own.mailbox.put(Submit([long]))
        for _ in range(8):
            own.loop.step()
        for message in (Cancel([long.handle]), ReleaseMemory()):  # its blocks are evicted, and the cache is zero
            own.mailbox.put(message)
        own.loop.step()
        until_s = time.monotonic() + 120
        while tiers._pending_bytes and time.monotonic() < until_s:
            time.sleep(0.001)
        assert own.generate([PROMPT], GREEDY) == plain.generate([PROMPT], GREEDY)
        assert tiers.counts["memory"].hits == 0
    finally:
        own.loop._outside.close()


class Engine:
    """A process that takes as long as it is told to."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.go_on = asyncio.Event()

    async def stop(self) -> None:
        await self.go_on.wait()
        self.done.append("stop")

    async def start(self, front: Front) -> None:
        self.done.append("start")

    async def wait_ready(self) -> None:
        await self.go_on.wait()


def front_of(driver: Driver) -> Front:
    front = Front(NoText(), "m", driver.mailbox.put)
    front.deliver(driver.loop.adapters)
    front.deliver(driver.card)
    return front


def test_a_change_goes_on_when_its_caller_is_gone(model: Any) -> None:
    """Else the engine would be stopped, and nobody could wake it; or two of them would be started."""

    async def lives() -> list[str]:
        engine = Engine()
        sleeping = SleepingProcess(cast(EngineProcess, engine), front_of(Driver(model)))
        for change in (sleeping.sleep(2), sleeping.wake_up()):
            engine.go_on.clear()
            caller = asyncio.create_task(change)
            while not caller.done():
                await asyncio.sleep(0)
                caller.cancel()
            engine.go_on.set()
            async with sleeping._turn:  # once it has ended
                pass
        await sleeping.wake_up()
        assert not sleeping.is_sleeping
        return engine.done

    assert asyncio.run(asyncio.wait_for(lives(), 120)) == ["stop", "start"]


def test_an_engine_that_died_in_its_sleep_is_not_said_to_be_there(model: Any) -> None:
    front = front_of(Driver(model))
    nap = Nap(front, lambda message: None)
    front.lose(EngineDied("it was killed"))
    nap.end()
    assert not front.ready
    front = front_of(Driver(model))
    Nap(front, lambda message: None).end()
    assert front.ready


def test_all_devices_give_their_memory_back(model: Any) -> None:
    class Ranks:
        num_released = 0

        def release_memory(self) -> None:
            self.num_released += 1

    driver, ranks = Driver(model), Ranks()
    driver.loop._ranks = cast(Any, ranks)
    driver.mailbox.put(ReleaseMemory())
    driver.loop.step()
    assert ranks.num_released == 1
