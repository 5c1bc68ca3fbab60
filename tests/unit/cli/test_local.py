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

from tonle.cli.backends import AnswerOptions, AnswerStats, Message, Prompt
from tonle.cli.backends.local import LocalBackend, _room
from tonle.config.engine import EngineConfig
from tonle.errors import ContextOverflow
from tonle.models.source import ModelSource

QUESTION: list[Message] = [{"role": "user", "content": "hello"}]
CONFIG = EngineConfig(device="cpu", memory_pool_size=8 << 20, max_sequence_length=None)


def with_backend(folder: Path, use: Any, config: EngineConfig = CONFIG) -> None:
    async def main() -> None:
        backend = LocalBackend(ModelSource("folder", folder, "tiny"), config, chats=True)
        try:
            await backend.start()
            await asyncio.wait_for(use(backend), timeout=240)
        finally:
            await backend.close()

    asyncio.run(main())


async def ask(backend: LocalBackend, prompt: Prompt, **options: Any) -> tuple[str, AnswerStats]:
    stats = AnswerStats()
    return "".join([piece async for piece in backend.answer(prompt, AnswerOptions(**options), stats)]), stats


def test_answers(tiny_folder: Path) -> None:
    async def use(backend: LocalBackend) -> None:
        _, stats = await ask(backend, QUESTION, temperature=0, max_tokens=5)
        assert (backend.name, stats.completion_tokens, stats.context_length) == ("tiny", 5, 1024)
        assert stats.finish_reason == "length" and stats.ttft_s is not None
        _, raw = await ask(backend, "hello", max_tokens=1)
        assert raw.prompt_tokens < stats.prompt_tokens, "text is continued as it is, without a template"
        texts = [(await ask(backend, QUESTION, temperature=1, max_tokens=16, seed=seed))[0] for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]

    with_backend(tiny_folder, use)


def test_what_is_not_given_is_left_to_the_model(tiny_folder: Path) -> None:
    greedy = replace(CONFIG, override_generation_config={"temperature": 0.0})

    async def use(backend: LocalBackend) -> None:
        answers = {(await ask(backend, QUESTION, max_tokens=16))[0] for _ in range(3)}
        assert answers == {(await ask(backend, QUESTION, temperature=0, max_tokens=16))[0]}

    with_backend(tiny_folder, use, greedy)


def test_leaving_early_cancels_at_the_engine(tiny_folder: Path) -> None:
    async def use(backend: LocalBackend) -> None:
        async with contextlib.aclosing(
            backend.answer(QUESTION, AnswerOptions(max_tokens=900), AnswerStats())
        ) as pieces:
            await anext(pieces)
        assert backend._front.num_live == 0
        await ask(backend, QUESTION, max_tokens=2)
        assert backend._front.stats.num_running == 0, "the engine itself has let go of it"

    with_backend(tiny_folder, use)


def test_an_engine_that_died_is_awaited(tiny_folder: Path) -> None:
    async def use(backend: LocalBackend) -> None:
        assert backend._engine.pid is not None
        os.kill(backend._engine.pid, signal.SIGKILL)
        while backend._front.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        _, stats = await ask(backend, QUESTION, max_tokens=2)
        assert stats.completion_tokens > 0
        assert backend._engine.num_starts == 2

    with_backend(tiny_folder, use)


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
