"""`LocalBackend`: an engine in a child process. No HTTP, and no torch in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from tonle.cli.backends import AnswerOptions, AnswerStats, Prompt
from tonle.config.engine import EngineConfig
from tonle.engine.front import Front
from tonle.engine.generation import Generation
from tonle.engine.messages import ModelCard
from tonle.engine.process import EngineProcess
from tonle.engine.request import GenerationConfig
from tonle.engine.text import load_text
from tonle.errors import ContextOverflow, ModelError
from tonle.models.source import ModelSource

_ROOM_SHARE = 4  # an answer gets at least a quarter of the context, unless it may not be that long
_POLL_S = 0.05


class LocalBackend:
    def __init__(self, source: ModelSource, config: EngineConfig, *, chats: bool) -> None:
        """`chats`: it will be asked with messages, so the model must have a chat template. Raises `ModelError`."""
        self._text = load_text(source, special_tokens_in_content=config.special_tokens_in_content)
        if chats and self._text.chat_template is None:
            raise ModelError(
                f"{source.name} has no chat template: it continues text and does not answer. "
                'Try: tonle run --raw "Once upon a time"'
            )
        self._engine = EngineProcess(source, config)
        self._front = Front(self._text, source.name, self._engine.send, hold_clusters=config.hold_clusters)

    @property
    def name(self) -> str:
        return self._front.name

    async def start(self) -> None:
        await self._engine.start(self._front)
        await self._engine.wait_ready()

    async def close(self) -> None:
        await self._engine.stop()

    async def answer(self, prompt: Prompt, options: AnswerOptions, stats: AnswerStats) -> AsyncGenerator[str, None]:
        card = await self._card()
        tokens = self._text.encode(prompt) if isinstance(prompt, str) else self._text.encode_chat(list(prompt))
        stats.asked_s = time.monotonic()
        stats.context_length = card.context_length
        wanted = options.max_tokens or card.defaults.max_chat_tokens or card.context_length
        limit = min(wanted, card.defaults.max_tokens_limit or wanted)
        stats.max_tokens = _room(len(tokens), limit, card.context_length)
        generation = self._front.submit(tokens, _generation_config(options, stats.max_tokens))
        try:
            async for delta in generation:
                _count(generation, stats)
                stats.finish_reason = delta.finish_reason
                if delta.text:
                    yield delta.text
        finally:
            generation.cancel()

    async def _card(self) -> ModelCard:
        """Of the running engine; if it died since the last answer, it is on its way back."""
        while (card := self._front.card) is None:  # noqa: ASYNC110  (the front has no event for it, and this is rare)
            await asyncio.sleep(_POLL_S)
        return card


def _generation_config(options: AnswerOptions, max_length: int) -> GenerationConfig:
    """What the user asked for. What the user did not give stays open: the model has defaults of its own."""
    return GenerationConfig(
        temperature=options.temperature, top_p=options.top_p, seed=options.seed, max_length=max_length
    )


def _room(num_prompt_tokens: int, max_tokens: int | None, context_length: int) -> int:
    """Tokens the answer may have: `max_tokens`, or all that the context has left if that is enough for an answer."""
    room = context_length - num_prompt_tokens
    wanted = context_length if max_tokens is None else max_tokens
    if room < max(1, min(wanted, context_length // _ROOM_SHARE)):
        raise ContextOverflow(
            f"the prompt has {num_prompt_tokens} tokens and the context holds {context_length}: "
            "that leaves too little room for an answer. Shorten the prompt"
        )
    return min(wanted, room)


def _count(generation: Generation, stats: AnswerStats) -> None:
    stats.first_s = generation.timings.first_token_s
    stats.last_s = time.monotonic()
    stats.prompt_tokens = generation.usage.prompt_tokens
    stats.cached_tokens = generation.usage.cached_tokens
    stats.completion_tokens = generation.usage.completion_tokens
