"""An engine process that dies comes back with the adapters that were loaded while it ran."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from tests.fakes.adapters import merge, write_adapter
from tests.fakes.checkpoints import save_folder, tiny_model
from tests.parity.test_engine import reference
from tonle.config.engine import EngineConfig
from tonle.engine.front import Front
from tonle.engine.process import EngineProcess
from tonle.engine.request import GenerationConfig
from tonle.engine.text import load_text
from tonle.errors import TonleError, UnknownModel
from tonle.models.load.transformers_model import live_spec
from tonle.models.source import resolve

PROMPT = list(range(20, 60))
GREEDY = GenerationConfig(max_length=8, do_sample=False, early_stopping=False)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3_000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came to be")


def test_an_engine_that_was_killed_has_its_adapters_again(tmp_path: Path) -> None:
    model = save_folder("llama", tmp_path / "model")
    adapters = {
        name: write_adapter(tmp_path / name, live_spec(model), seed=seed)
        for seed, name in enumerate(("start", "later", "gone"))
    }
    lora = {name: str(tmp_path / name) for name in ("start", "gone")}
    # float32 as asked: the path of torch operations
    config = EngineConfig(lora=lora, device="cpu", dtype="float32", memory_pool_size=2**20, max_sequence_length=128)

    async def main() -> None:
        source = resolve(str(tmp_path / "model"))
        engine = EngineProcess(source, config)
        front = Front(load_text(source), "tiny", engine.send)

        async def ask(name: str) -> list[int]:
            return (await front.submit(PROMPT, GREEDY, adapter=name).result()).output_ids[0]

        await engine.start(front)
        try:
            expected = {  # computed while the engine starts
                name: await asyncio.to_thread(reference, merge(tiny_model("llama"), adapters[name]), PROMPT, 8)
                for name in ("start", "later")
            }
            await engine.wait_ready()
            assert await ask("start") == expected["start"]
            await front.load_adapter("later", tmp_path / "later")
            await front.unload_adapter("gone")
            assert await ask("later") == expected["later"]
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)  # so that it cannot finish what it gets
            under_way = front.submit(PROMPT, GenerationConfig(max_length=80, early_stopping=False), adapter="later")
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(TonleError):
                await under_way.result()
            await until(lambda: front.ready and set(front.adapters) == {"start", "later"})
            assert await ask("later") == expected["later"] and await ask("start") == expected["start"]
            with pytest.raises(UnknownModel):
                await ask("gone")
        finally:
            await engine.stop()

    uvloop.run(main())
