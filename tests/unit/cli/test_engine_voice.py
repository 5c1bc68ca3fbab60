"""Asking an engine of our own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tonle.cli.voices import Message, Prompt, Sampling, Tally
from tonle.cli.voices.engine import EngineVoice, _room
from tonle.config.engine import EngineConfig
from tonle.errors import ContextOverflow
from tonle.models.source import ModelSource

QUESTION: list[Message] = [{"role": "user", "content": "hello"}]
CONFIG = EngineConfig(device="cpu", memory_pool_size=8 << 20, max_sequence_length=None)


def with_voice(folder: Path, use: Any, config: EngineConfig = CONFIG) -> None:
    async def main() -> None:
        voice = EngineVoice(ModelSource("folder", folder, "tiny"), config, chats=True)
        try:
            await voice.start()
            await asyncio.wait_for(use(voice), timeout=60)
        finally:
            await voice.close()

    asyncio.run(main())


async def ask(voice: EngineVoice, prompt: Prompt, **sampling: Any) -> tuple[str, Tally]:
    tally = Tally()
    return "".join([piece async for piece in voice.answer(prompt, Sampling(**sampling), tally)]), tally


def test_answers(tiny_folder: Path) -> None:
    async def use(voice: EngineVoice) -> None:
        _, tally = await ask(voice, QUESTION, temperature=0, max_tokens=5)
        assert (voice.name, tally.completion_tokens, tally.context_length) == ("tiny", 5, 1024)
        assert tally.finish_reason == "length" and tally.ttft_s is not None
        _, raw = await ask(voice, "hello", max_tokens=1)
        assert raw.prompt_tokens < tally.prompt_tokens, "text is continued as it is, without a template"
        texts = [(await ask(voice, QUESTION, temperature=1, max_tokens=16, seed=seed))[0] for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]

    with_voice(tiny_folder, use)


def test_the_models_defaults_are_used(tiny_folder: Path) -> None:
    greedy = replace(CONFIG, override_generation_config={"temperature": 0}, default_max_tokens=6)

    async def use(voice: EngineVoice) -> None:
        texts = [await ask(voice, QUESTION, seed=seed) for seed in (1, 2)]
        assert texts[0][0] == texts[1][0] and texts[0][1].max_tokens == 6 >= texts[0][1].completion_tokens
        warm = [(await ask(voice, QUESTION, seed=seed, temperature=2.0, max_tokens=20))[0] for seed in (1, 2)]
        assert warm[0] != warm[1], "what is asked for wins"

    with_voice(tiny_folder, use, greedy)


def test_leaving_early_cancels_at_the_engine(tiny_folder: Path) -> None:
    async def use(voice: EngineVoice) -> None:
        async with contextlib.aclosing(voice.answer(QUESTION, Sampling(max_tokens=900), Tally())) as pieces:
            await anext(pieces)
        assert voice._front.num_live == 0
        await ask(voice, QUESTION, max_tokens=2)
        assert voice._front.stats.num_running == 0, "the engine itself has let go of it"

    with_voice(tiny_folder, use)


def test_an_engine_that_died_is_awaited(tiny_folder: Path) -> None:
    async def use(voice: EngineVoice) -> None:
        assert voice._engine.pid is not None
        os.kill(voice._engine.pid, signal.SIGKILL)
        while voice._front.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        _, tally = await ask(voice, QUESTION, max_tokens=2)
        assert tally.completion_tokens > 0
        assert voice._engine.num_starts == 2

    with_voice(tiny_folder, use)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "room"),
    [(100, 512, 512), (600, 512, 424), (768, 512, 256), (1000, 24, 24), (1023, 1, 1)],
)
def test_an_answer_gets_what_is_left_if_that_is_enough(num_prompt_tokens: int, max_tokens: int, room: int) -> None:
    assert _room(num_prompt_tokens, max_tokens, 1024) == room


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(769, 512), (1024, 1), (5000, 5)])
def test_a_prompt_that_leaves_no_room_is_refused(num_prompt_tokens: int, max_tokens: int) -> None:
    with pytest.raises(ContextOverflow, match="too little room"):
        _room(num_prompt_tokens, max_tokens, 1024)
