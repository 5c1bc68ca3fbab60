"""The front of an engine: prompts in, deltas out. Torch-free; lives in the caller's process, on one event loop.

Down: check, give handles, hand to the link. Up: one `Step` per step comes back through `deliver`, becomes text, and wakes
the caller that iterates the `Generation`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import msgspec

from tonle.config.adapter_names import models_own_name
from tonle.engine.adapters.front_adapters import FrontAdapters
from tonle.engine.continuation import Continuation
from tonle.engine.embedding import Embedding, FrontEmbeddings
from tonle.engine.front_errors import check_priority, check_prompt, ended_early, refusal
from tonle.engine.generation import Generation
from tonle.engine.grammar.grammar_text import grammar_text
from tonle.engine.messages import (
    AdapterInfo,
    AdapterReply,
    Adapters,
    Cancel,
    Failed,
    LoopStats,
    ModelCard,
    Step,
    Submit,
    ToEngine,
    ToFront,
)
from tonle.engine.request import (
    FinishReason,
    GenerationConfig,
    RemoteBlocks,
    Request,
    RequestPriority,
    ResolvedConfig,
)
from tonle.engine.sample.noise import child_seed
from tonle.engine.text import Text, TextStream
from tonle.errors import (
    ContextOverflow,
    EngineDied,
    EngineRestarting,
    InvalidRequest,
    TonleError,
)

_MAX_NAMES = 8192  # of the latest continuations


class Front:
    """Owns every request between its submission and its last delta."""

    def __init__(self, text: Text, name: str, send: Callable[[ToEngine], None], *, hold_clusters: str = "auto") -> None:
        self.text = text
        self.name = name
        self.created = int(time.time())
        self.card: ModelCard | None = None  # None until the engine is ready
        self.failure: TonleError | None = None  # why it is not
        self.stats = LoopStats()
        self._send = send
        self._hold_clusters = hold_clusters
        self._next_handle = 0
        self._live: dict[int, Continuation] = {}
        self._names: OrderedDict[int, str] = OrderedDict()  # handle -> request id, of the latest
        self._adapters = FrontAdapters(send)
        self._embeddings = FrontEmbeddings(send, self._new_handle, self._adapters)

    @property
    def ready(self) -> bool:
        return self.card is not None

    @property
    def num_live(self) -> int:
        """Continuations and embeddings under way."""
        return len(self._live) + len(self._embeddings.live)

    # -- down

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
    ) -> Generation:
        """Check the request and hand it to the engine. Raises `CallerError` or `CapacityError` at once.

        `remote`: its prompt is fetched from another engine. `keep_blocks`: its prompt is kept for another one, and
        `Generation.kept` says where. Only of engines with such a role."""
        config.validate()
        check_priority(priority)
        grammar = self._grammar(config)
        config = msgspec.structs.replace(self._resolve(prompt, config), structured=None)  # it crosses as `grammar`
        info = None if adapter is None else self._adapters.find(adapter)
        if info is not None:  # cached prefixes are found by what computed them
            salt = info.digest.encode() + salt
        now = time.monotonic()
        generation = Generation(request_id or f"req-{secrets.token_hex(8)}", prompt, config, now, self._drop)
        generation.adapter = info
        # Candidates are compared by their log-probabilities.
        chooses = config.num_candidates > config.n and config.logprobs is None
        asked = msgspec.structs.replace(config, logprobs=0) if chooses else config
        seed = secrets.randbits(63) if config.seed is None else config.seed
        requests = [
            Request(
                handle=self._next_handle + 1 + index,
                prompt=prompt,
                config=asked,
                priority=priority,
                seed=child_seed(seed, index),
                salt=salt,
                arrived_s=now,
                adapter=0 if info is None else info.id,
                grammar=grammar,
                remote=remote,
                keep_blocks=keep_blocks and index == 0,
            )
            for index in range(config.num_candidates)
        ]
        self._next_handle += config.num_candidates
        self._send(Submit(requests))  # first: what follows reads the whole prompt, and the engine need not wait for it
        for index, request in enumerate(requests):
            self._live[request.handle] = Continuation(generation, index, self._stream(prompt, config))
            generation.handles.append(request.handle)
            self._names[request.handle] = generation.request_id
        while len(self._names) > _MAX_NAMES:
            self._names.popitem(last=False)
        return generation

    def request_name(self, handle: int) -> str | None:
        """The id of the request with this handle, if it is among the latest: for explanations that speak of other requests."""
        return self._names.get(handle)

    async def embed(
        self,
        prompts: list[list[int]],
        *,
        pooling: str = "last",
        priority: RequestPriority = RequestPriority.NORMAL,
        salt: bytes = b"",
        adapter: str | None = None,
    ) -> list[Embedding]:
        """An embedding of each prompt. Cancelling the await frees what is under way. Raises `CallerError` or `CapacityError`."""
        return await self._embeddings.embed(
            self.ready_card(), prompts, pooling=pooling, priority=priority, salt=salt, adapter=adapter
        )

    def _new_handle(self) -> int:
        self._next_handle += 1
        return self._next_handle

    def _grammar(self, config: GenerationConfig) -> str:
        """What the text must be; empty: anything."""
        if config.structured is None:
            return ""
        self.text.check_tokens_are_bytes()
        return grammar_text(config.structured, self.text.special_tokens)

    def _stream(self, prompt: list[int], config: GenerationConfig) -> TextStream:
        return self.text.stream(
            prompt,
            stop=config.stop,
            include_stop_text=config.include_stop_text,
            skip_special_tokens=config.skip_special_tokens,
            hold_clusters=self._hold_clusters,
        )

    def prepare_chat(
        self, messages: list[dict[str, Any]], config: GenerationConfig
    ) -> tuple[list[int], GenerationConfig]:
        """The prompt of a conversation, and `config` with what it leaves open settled for an answer. From any thread."""
        prompt, card = self.text.encode_chat(messages), self.card
        if card is None:  # `submit` says why
            return prompt, config
        config.validate()
        room = card.context_length - len(prompt)
        return prompt, card.defaults.apply(config, max_tokens=card.defaults.max_chat_tokens, room=room)

    def _resolve(self, prompt: list[int], config: GenerationConfig) -> ResolvedConfig:
        """`config` with the model's defaults, if the engine can run it."""
        card = self.ready_card()
        check_prompt(prompt, card.vocab_size)
        if any(token >= card.vocab_size for token in (*config.logit_bias, *config.stop_token_ids)):
            raise InvalidRequest(f"token ids must lie in 0..{card.vocab_size - 1}", param="logit_bias")
        if (thinking := config.thinking) is not None and any(
            not 0 <= token < card.vocab_size for token in (*thinking.start, *thinking.end, *thinking.closing)
        ):
            raise InvalidRequest(f"token ids must lie in 0..{card.vocab_size - 1}", param="thinking")
        if not isinstance(config, ResolvedConfig):
            max_tokens = card.defaults.max_new_tokens or ResolvedConfig().max_length
            room = card.context_length - len(prompt)
            config = card.defaults.apply(config, max_tokens=max_tokens, room=room)
        if len(prompt) + config.max_length > card.context_length:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens and {config.max_length} new ones are asked for: together "
                f"{len(prompt) + config.max_length}, but the context holds {card.context_length} "
                "(max_sequence_length); shorten the prompt or ask for fewer",
                param="max_tokens" if len(prompt) < card.context_length else "prompt",
            )
        return config

    def ready_card(self) -> ModelCard:
        """Raises `EngineRestarting` if the engine is not ready."""
        if self.card is not None:
            return self.card
        if self.failure is not None:
            raise EngineRestarting(f"the engine is not running: {self.failure.message}", retry_after_s=5)
        raise EngineRestarting("the engine is still starting; try again shortly", retry_after_s=2)

    def _drop(self, generation: Generation) -> None:
        self._withdraw(generation)
        generation.close()

    def _withdraw(self, generation: Generation) -> None:
        """Let go of whatever the engine still works on for it."""
        handles = [handle for handle in generation.handles if handle in self._live]
        generation.handles.clear()
        for handle in handles:
            continuation = self._live.pop(handle)
            if continuation.has_tokens:
                delta = continuation.delta([], None)
                continuation.finish(delta)
                generation.push(delta, time.monotonic())
        if handles:
            self._send(Cancel(handles))

    # -- adapters

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """Those that requests may name now."""
        return self._adapters.known

    @property
    def awaited_adapters(self) -> dict[str, AdapterInfo]:
        """Those that an engine had which is gone, and that the next one will have. Until then, requests for them are refused
        with `EngineRestarting`."""
        return self._adapters.awaited

    async def load_adapter(self, name: str, path: str | os.PathLike[str], *, replace: bool = False) -> AdapterInfo:
        """Read the LoRA adapter in the folder `path`, and serve it as `name`. `replace`: also if that name is taken;
        requests under way go on with what they began with. Raises `CallerError` or `CapacityError`."""
        self._check_takes_adapters()
        if name == self.name:
            raise InvalidRequest(models_own_name(name), param="name")
        return await self._adapters.load(name, path, replace=replace)

    async def unload_adapter(self, name: str) -> None:
        """Take the name away at once. Requests under way go on to their end. Raises `UnknownModel`."""
        self._check_takes_adapters()
        await self._adapters.unload(name)

    def _check_takes_adapters(self) -> None:
        if not self.ready_card().max_loras:
            raise InvalidRequest(
                "this engine takes no LoRA adapters; start it with enable_lora=True (--enable-lora), or with adapters of its "
                "own: lora={...} (--lora NAME=PATH)"
            )

    # -- up

    def deliver(self, message: ToFront) -> None:
        """One message from the engine, on the event loop."""
        match message:
            case Step():
                self._deliver_step(message)
            case ModelCard():
                self.card = message
                self.text.max_tokens = message.context_length
                self.failure = None
                self._adapters.welcome(message)
            case Adapters() | AdapterReply():
                self._adapters.deliver(message)
            case Failed():
                self.lose(message.error)

    def cancel_all(self) -> None:
        """The engine stops its work on all requests. Their callers hear of it by what comes next."""
        if handles := [*self._live, *self._embeddings.live]:
            self._send(Cancel(handles))

    def lose(self, error: TonleError) -> None:
        """The engine is gone: all waiting callers get the error now."""
        self.card = None
        self.failure = error
        self._adapters.lose(error)
        self.stats = LoopStats()
        died = f"the engine stopped while it worked on this request: {error.message}"
        self._embeddings.lose(died)
        lost = {id(c.generation): c.generation for c in self._live.values()}
        self._live.clear()
        for generation in lost.values():
            generation.handles.clear()
            generation.fail(EngineDied(died))

    def _deliver_step(self, step: Step) -> None:
        now = time.monotonic()
        self.stats = step.stats
        if self._embeddings.live:
            self._embeddings.deliver(step)
        for handle, (when, cached) in step.started.items():
            if handle in self._live:
                generation = self._live[handle].generation
                if generation.timings.scheduled_s is None:
                    generation.timings.scheduled_s = when
                    generation.usage.cached_tokens = cached
        for handle, (first, records) in step.prompt_logprobs.items():
            if handle in self._live and (known := self._live[handle].generation.prompt_logprobs) is not None:
                known[first : first + len(records)] = records
        for handle, kept in step.kept.items():
            if handle in self._live:
                self._live[handle].generation.kept = kept
        for handle, (drafted, accepted) in step.guesses.items():
            if handle in self._live:
                self._live[handle].generation.add_guesses(drafted, accepted)
        for handle, spent in step.spent.items():
            if handle in self._live:
                self._live[handle].generation.add_spent(spent)
        offset = 0
        for handle, count in zip(step.handles, step.counts, strict=True):
            if (continuation := self._live.get(handle)) is not None:
                tokens, generation = step.tokens[offset : offset + count], continuation.generation
                if count and generation.timings.first_token_s is None:
                    generation.timings.first_token_s = now
                if generation.whole and not generation.config.stop and handle not in step.finished:
                    continuation.hold(tokens, step.logprobs.get(handle))
                else:
                    self._deliver_tokens(handle, tokens, step, now)
            offset += count
        for handle, (reason, _) in step.finished.items():
            if handle in self._live:  # ended without a token
                self._fail(handle, ended_early(reason, self._live[handle].generation.adapter))
        for handle, why in step.refused.items():
            if handle in self._live:
                self._fail(handle, refusal(why, self._live[handle].generation.adapter, self._adapters))

    def _deliver_tokens(self, handle: int, tokens: list[int], step: Step, now: float) -> None:
        continuation = self._live[handle]
        delta = continuation.delta(tokens, step.logprobs.get(handle))
        if continuation.stream.stopped is not None:
            delta.finish_reason, delta.stop_reason = "stop", continuation.stream.stopped
            if handle not in step.finished:
                self._send(Cancel([handle]))
        elif handle in step.finished:
            reason, token = step.finished[handle]
            delta.finish_reason = cast(FinishReason, reason)
            delta.stop_reason = token if token not in self._eos_ids else None
        if delta.finish_reason is not None:
            continuation.finish(delta)
            del self._live[handle]
            continuation.generation.handles.remove(handle)
        if delta.tokens or delta.finish_reason is not None:  # else its tokens wait for their text
            continuation.generation.push(delta, now)

    def _fail(self, handle: int, error: TonleError) -> None:
        continuation = self._live.get(handle)
        if continuation is not None:
            continuation.generation.fail(error)
            self._withdraw(continuation.generation)

    @property
    def _eos_ids(self) -> list[int]:
        return [] if self.card is None else self.card.eos_ids
