"""A scripted twin of an engine's front: a byte tokenizer, and answers that are written down beforehand.

Does: everything a replica may expect of a front, on one event loop, with no engine behind it. It obeys max_length,
stop, n, logprobs and cancel; it samples nothing. An adapter is a folder with one file, whose text every answer begins with.
Tests turn its screws: `reply`, `stall_after`, `die_after`...
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from tonle.engine.best_of import BestOf
from tonle.engine.embedding import Embedding
from tonle.engine.messages import AdapterInfo, LoopStats, ModelCard
from tonle.engine.request import (
    Delta,
    GenerationConfig,
    GenerationResult,
    RemoteBlocks,
    RequestPriority,
    Timings,
    TokenLogprob,
    Usage,
)
from tonle.engine.text import Text
from tonle.errors import EngineDied, EngineRestarting, ModelError, TonleError, UnknownModel
from tonle.replica.chat_style import chat_style
from tonle.replica.translate import ServedModel
from tonle.telemetry.time_spent import TimeSpent

BEGIN, END = 256, 257  # the special tokens; 0..255 are bytes
CACHED_TOKENS = 4  # of every prompt, so that tests can see the number arrive


class ByteText:
    """Tokens are the bytes of UTF-8."""

    chat_template = "<role>content\n"
    tool_template = chat_template
    special_tokens: dict[str, int] = {"<begin>": BEGIN, "<end>": END}  # noqa: RUF012

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BEGIN] * add_special_tokens + list(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        pieces = (self.token_bytes(token) for token in tokens if token < BEGIN or not skip_special_tokens)
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return {BEGIN: b"<begin>", END: b"<end>"}.get(token) or bytes([token])

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> str:
        lines = [f"<{message['role']}>{message['content']}\n" for message in messages]
        lines += [f"[tool {tool['function']['name']}]" for tool in tools or ()]
        lines += [f"[{name}={value}]" for name, value in (extra or {}).items()]
        return "".join(lines) + "<assistant>" * add_generation_prompt

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> list[int]:
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra)
        return self.encode(text.removesuffix("\n") if continue_final_message else text)


class FakeGeneration:
    def __init__(
        self, front: FakeFront, prompt: list[int], config: GenerationConfig, request_id: str, opening: str = ""
    ) -> None:
        self.request_id = request_id
        self.opening = opening  # an adapter's
        self.adapter: AdapterInfo | None = None
        self.prompt = prompt
        self.config = config
        self.usage = Usage(prompt_tokens=len(prompt), cached_tokens=min(CACHED_TOKENS, len(prompt)))
        self.timings = Timings(time.monotonic())
        self.spent = front.spent.pop(0) if front.spent else None
        self.draft_tokens = self.spent.draft_tokens if self.spent is not None else 0
        self.accepted_tokens = self.spent.accepted_tokens if self.spent is not None else 0
        self.prompt_logprobs = None
        if config.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *(_logprob(token, config.prompt_logprobs) for token in prompt[1:])]
        self._front = front
        self._ended = False
        self._pump: asyncio.Task[None] | None = None

    async def result(self) -> GenerationResult:
        deltas = [delta async for delta in self._deltas()]
        return GenerationResult(
            request_id=self.request_id, prompt_ids=self.prompt, texts=["".join(delta.text for delta in deltas)],
            output_ids=[[token for delta in deltas for token in delta.tokens]], finish_reasons=["length"],
            usage=self.usage, timings=self.timings, prompt_logprobs=self.prompt_logprobs,
        )  # fmt: skip

    def cancel(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
        if not self._ended:
            self._ended = True
            self._front.cancelled.put(self.request_id)

    def listen(self, on_delta: Callable[[Delta], None], *, whole: bool = False) -> asyncio.Future[None]:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def pump() -> None:
            try:
                async for delta in self._deltas():
                    on_delta(delta)
            except Exception as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        self._pump = asyncio.create_task(pump())
        return ended

    async def _deltas(self) -> AsyncIterator[Delta]:
        front, config = self._front, self.config
        asked = msgspec.structs.replace(config, logprobs=0) if config.best_of and config.logprobs is None else config
        choices = [front.script(self.prompt, asked, index, self.opening) for index in range(config.num_candidates)]
        best_of = BestOf(config) if config.num_candidates > config.n else None
        self.timings.scheduled_s = self.timings.arrived_s + front.queue_s if front.queue_s else time.monotonic()
        num_tokens = 0
        while any(choices):
            for script in choices:
                if not script:
                    continue
                if front.die_after is not None and num_tokens >= front.die_after:
                    self._ended = True
                    raise EngineDied("the engine stopped while it worked on this request: scripted")
                if front.stall_after is not None and num_tokens >= front.stall_after:
                    await asyncio.Event().wait()
                await asyncio.sleep(front.delay_s)
                delta = script.pop(0)
                num_tokens += len(delta.tokens)
                self.usage.completion_tokens += len(delta.tokens)
                front.count(generation_tokens=len(delta.tokens))
                self.timings.first_token_s = self.timings.first_token_s or time.monotonic()
                if not any(choices):
                    self._ended = True
                    self.timings.finished_s = time.monotonic()
                for shown in [delta] if best_of is None else best_of.add(delta):
                    yield shown


class FakeFront:
    """`reply(prompt text, choice index)` is what it answers."""

    def __init__(self, reply: Callable[[str, int], str] | None = None) -> None:
        self.text = ByteText()
        self.name = "scripted"
        self.created = 1_700_000_000
        self.card: ModelCard | None = ModelCard(
            architecture="Scripted", context_length=512, vocab_size=258, eos_ids=[END], device="none", dtype="none",
            block_size=16, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64, load_s=0.0, max_loras=4,
            hidden_size=2, kv_dtype="float32",
        )  # fmt: skip
        self.stats = LoopStats()
        self.embedded: list[dict[str, Any]] = []  # how embeddings were asked for
        self.adapters: dict[str, AdapterInfo] = {}
        self.awaited_adapters: dict[str, AdapterInfo] = {}  # of an engine that was lost
        self.loading = asyncio.Event()  # while not set, an adapter is being read
        self.loading.set()
        self._openings: dict[int, str] = {}  # by id of an adapter
        self.failure: TonleError | None = None
        self.reply = reply or (lambda prompt, index: "សួស្តី, I am scripted." + "!" * index)
        self.refusal: TonleError | None = None  # raised by submit
        self.die_after: int | None = None  # tokens of one request
        self.stall_after: int | None = None  # tokens of one request, then nothing comes any more
        self.delay_s = 0.0  # between deltas
        self.queue_s = 0.0  # that it says a request waited
        self.spent: list[TimeSpent] = []  # of the next generations
        self.submitted: list[tuple[FakeGeneration, RequestPriority]] = []
        self.cancelled: queue.Queue[str] = queue.Queue()  # ids of requests cancelled before their end

    @property
    def ready(self) -> bool:
        return self.card is not None

    def served(self, *, max_choices: int = 8) -> ServedModel:
        """For what translates requests."""
        assert self.card is not None
        text = cast(Text, self.text)
        return ServedModel(text, self.card, max_choices, chat_style(text))

    def submit(
        self,
        prompt: list[int],
        config: GenerationConfig,
        *,
        priority: RequestPriority = RequestPriority.NORMAL,
        salt: bytes = b"",
        request_id: str | None = None,
        adapter: str | None = None,
        remote: RemoteBlocks | None = None,
        keep_blocks: bool = False,
    ) -> FakeGeneration:
        config.validate()
        if self.refusal is not None:
            raise self.refusal
        if self.card is None:
            raise EngineRestarting("scripted to be away")
        if adapter in self.awaited_adapters:
            raise EngineRestarting(f"adapter {adapter} is being loaded again", retry_after_s=2)
        if adapter is not None and adapter not in self.adapters:
            raise UnknownModel(f"there is no adapter {adapter!r}", param="model")
        opening = "" if adapter is None else self._openings[self.adapters[adapter].id]
        generation = FakeGeneration(self, prompt, config, request_id or f"req-{len(self.submitted)}", opening)
        generation.adapter = None if adapter is None else self.adapters[adapter]
        self.submitted.append((generation, priority))
        cached = generation.usage.cached_tokens
        self.count(prompt_tokens=len(prompt) - cached, prefix_hits=cached, prefix_queries=len(prompt))
        return generation

    async def embed(self, prompts: list[list[int]], **how: Any) -> list[Embedding]:
        """Of each prompt: its length, and 1."""
        self.embedded.append(how)
        now = time.monotonic()
        return [
            Embedding(Usage(len(prompt)), Timings(now, now, now, now), np.array([len(prompt), 1], np.float32))
            for prompt in prompts
        ]

    def count(self, **more: int) -> None:
        totals = {name: getattr(self.stats, name) + number for name, number in more.items()}
        self.stats = msgspec.structs.replace(self.stats, **totals)

    async def load_adapter(self, name: str, path: str, replace: bool = False) -> AdapterInfo:
        await self.loading.wait()
        if name in self.adapters and not replace:
            raise ModelError(f"there is an adapter {name} already")
        try:
            content = (Path(path) / "adapter.txt").read_text()
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        if "broken" in content:
            raise ModelError("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight has the wrong shape")
        info = AdapterInfo(name, len(self._openings) + 1, hashlib.sha256(content.encode()).hexdigest(), 8, path)
        self._openings[info.id] = content
        self.adapters = {**self.adapters, name: info}
        return info

    async def unload_adapter(self, name: str) -> None:
        if name in self.awaited_adapters:
            raise EngineRestarting(f"adapter {name} is being loaded again", retry_after_s=2)
        self.adapters = {known: info for known, info in self.adapters.items() if known != name}

    def script(self, prompt: list[int], config: GenerationConfig, index: int, opening: str = "") -> list[Delta]:
        """One delta per token. The text of a character comes with its last byte, so tokens run ahead of text."""
        tokens = [*(opening + self.reply(self.text.decode(prompt), index)).encode(), END]
        if not config.early_stopping:
            tokens = (tokens[:-1] * config.max_length)[: config.max_length]
        decoder = codecs.getincrementaldecoder("utf-8")()
        deltas: list[Delta] = []
        text = ""
        for token in tokens[: config.max_length]:
            piece = decoder.decode(bytes([token])) if token < BEGIN else ""
            deltas.append(Delta(index, piece, [token]))
            if config.logprobs is not None:
                deltas[-1].logprobs = [_logprob(token, config.logprobs)]
            text += piece
            if stop := next((stop for stop in config.stop if text.endswith(stop)), None):
                _cut(deltas, len(stop))
                deltas[-1].finish_reason, deltas[-1].stop_reason = "stop", stop
                return deltas
        deltas[-1].finish_reason = "stop" if deltas[-1].tokens == [END] else "length"
        return deltas


def _cut(deltas: list[Delta], num_chars: int) -> None:
    """Take the last characters back."""
    for delta in reversed(deltas):
        kept = max(0, len(delta.text) - num_chars)
        num_chars -= len(delta.text) - kept
        delta.text = delta.text[:kept]


def _logprob(token: int, num_top: int) -> TokenLogprob:
    """The likelihood falls with the distance from the token."""
    top = [((token + step) % BEGIN, -0.5 - step) for step in range(num_top)]
    return TokenLogprob(token, -0.5, top)
