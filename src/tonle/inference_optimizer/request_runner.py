"""`RequestRunner`: one request from its question to its answer, with the cache before the engine.

Does: look up, wait for an identical request, tokenize, generate, store, measure. Does not: know its callers; they are in other
threads and on other event loops (`optimized_engine.py`).
Runs: on the event loop of the engine's front, so the cache needs no lock; prompts are made on a thread pool beside it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tonle.cache import CachedResponse, ResponseCache, cache_key
from tonle.engine.front import Front
from tonle.engine.request import Delta, GenerationConfig
from tonle.errors import ConfigError, InternalError, ShuttingDown
from tonle.inference_optimizer.breakdown import Breakdown
from tonle.inference_optimizer.inference_config import InferenceConfig
from tonle.inference_optimizer.prompt import Conversation, PromptBuilder
from tonle.inference_optimizer.request_metrics import EndedRequest, Outcome, RequestMetrics

if TYPE_CHECKING:  # brings torch
    from tonle.engine.inference_engine import InferenceEngine

T = TypeVar("T")

OnText = Callable[[str], None]
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ChatRequest:
    talk: Conversation
    config: GenerationConfig  # with max_length set
    key: bytes | None  # in the cache; None = neither looked up nor stored
    began_s: float = field(default_factory=time.monotonic)


class Answer(msgspec.Struct, frozen=True):
    """What the cache keeps."""

    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    history_dropped: int
    truncation: str | None


_decode_answer = msgspec.json.Decoder(Answer).decode


class RequestRunner:
    """Owns a running engine, its cache and its metrics until `close`."""

    def __init__(self, engine: InferenceEngine, config: InferenceConfig, cache: ResponseCache | None) -> None:
        front = engine.front
        assert front.card is not None, "the engine has not been started"
        self.model = front.name
        self.cache = cache
        self.metrics = RequestMetrics(
            target_s=config.sla_seconds, window=config.metrics_window, window_s=config.metrics_window_seconds
        )
        self._engine = engine
        self._prompts = PromptBuilder(
            front.text,
            context_length=front.card.context_length,
            max_context_length=config.max_context_length,
            window=config.context_window,
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._closing = threading.Lock()

    # -- from any thread

    def begin(self, request: ChatRequest, on_text: OnText | None = None) -> Future[tuple[str, dict[str, Any]]]:
        """The response and its metadata. `on_text` gets the text as it is generated, on the front's event loop."""
        return self._call(lambda: self._answer(request, on_text))

    def clear_cache(self) -> int:
        return self._call(self._clear).result()

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def key_of(self, talk: Conversation, config: GenerationConfig) -> bytes:
        body = {"messages": talk.messages, **msgspec.to_builtins(config, str_keys=True)}
        return cache_key(tenant="", path="generate", model=(self.model,), body=body)

    def warm_up(self, talk: Conversation) -> float:
        """One request that is not counted, so that no caller's is the first. Returns how long it took, seconds."""
        config = GenerationConfig(max_length=WARM_UP_TOKENS, temperature=0.0, early_stopping=False)
        request = ChatRequest(talk, config, key=None)
        parts = Breakdown(request.began_s)
        self._call(lambda: self._compute(request, parts, None)).result()
        return parts.latency_s

    def close(self) -> None:
        """End what still runs, and the engine. A second call waits for the first."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            try:
                if self._engine.is_running:  # else it has ended by itself, and all requests with it
                    self._engine.on_front(self._end_all()).result()
            finally:  # after Ctrl-C, too: there is no second try
                self._engine.stop(drain_s=0.0)

    def _call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        with self._closing:
            if self._closed:
                raise ConfigError("this engine was closed; create another one")
            return self._engine.on_front(start())

    # -- on the front's event loop

    async def _answer(self, request: ChatRequest, on_text: OnText | None) -> tuple[str, dict[str, Any]]:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        parts = Breakdown(request.began_s)
        outcome: Outcome = "failed"
        hit, new_tokens = False, 0
        try:
            answer, hit = await self._find_or_compute(request, parts, on_text)
            parts.end("decoding")
            outcome, new_tokens = "answered", 0 if hit else answer.completion_tokens
            return answer.text, self._metadata(answer, parts, cache_hit=hit)
        except asyncio.CancelledError:
            outcome = "cancelled"
            if self._closed:
                raise ShuttingDown("the engine was closed while it worked on this request") from None
            raise
        finally:
            self._tasks.discard(task)
            self.metrics.add(EndedRequest(outcome, parts.latency_s, parts.parts, hit, new_tokens))

    async def _find_or_compute(
        self, request: ChatRequest, parts: Breakdown, on_text: OnText | None
    ) -> tuple[Answer, bool]:
        """An answer, and whether it was computed before, or for an identical request."""
        if self.cache is None or request.key is None:
            return await self._compute(request, parts, on_text), False
        shared = self.cache.is_computing(request.key)
        if shared:
            parts.end("cache_lookup")
        try:
            found = await self.cache.find(request.key)
        finally:
            parts.end("queue" if shared else "cache_lookup")
        if isinstance(found, CachedResponse):
            answer = _decode_answer(found.body)
            if on_text is not None and answer.text:
                on_text(answer.text)
            return answer, True
        stored: CachedResponse | None = None
        try:
            answer = await self._compute(request, parts, on_text)
            body = msgspec.json.encode(answer)
            stored = CachedResponse(body=body, content_type="application/json", stream=False, request_id="")
            return answer, False
        finally:
            found.land(stored)  # None if it failed or was cancelled: the next identical request computes it

    async def _compute(self, request: ChatRequest, parts: Breakdown, on_text: OnText | None) -> Answer:
        front, config = self._front(), request.config
        assert config.max_length is not None
        try:
            pool = asyncio.get_running_loop()
            prompt = await pool.run_in_executor(None, self._prompts.build, request.talk, config.max_length)
        finally:
            parts.end("tokenization")
        generation = front.submit(prompt.tokens, config)
        pieces: list[str] = []
        finish_reason = "cancelled"

        def on_delta(delta: Delta) -> None:
            nonlocal finish_reason
            finish_reason = delta.finish_reason or finish_reason
            if delta.text:
                pieces.append(delta.text)
                if on_text is not None:
                    on_text(delta.text)

        try:
            await generation.listen(on_delta, whole=on_text is None)
        finally:
            generation.cancel()
            timings = generation.timings
            for part in ("queue", "prefill", "generation"):
                moment = {"queue": timings.scheduled_s, "prefill": timings.first_token_s}.get(part, timings.finished_s)
                parts.end(part, moment)
                if moment is None:  # it ended here
                    break
        usage = generation.usage
        return Answer(
            text="".join(pieces),
            finish_reason=finish_reason,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            history_dropped=prompt.history_dropped,
            truncation=prompt.truncation,
        )

    def _front(self) -> Front:
        try:
            return self._engine.front
        except InternalError:
            raise InternalError(
                "the engine has ended with an error (see the log): close() this engine and create another one"
            ) from None

    def _metadata(self, answer: Answer, parts: Breakdown, *, cache_hit: bool) -> dict[str, Any]:
        return {
            "latency": parts.latency_s,
            "cache_hit": cache_hit,
            "model": self.model,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            "finish_reason": answer.finish_reason,
            "history_dropped": answer.history_dropped,
            "truncation": answer.truncation,
            "breakdown": dict(parts.parts),
        }

    async def _clear(self) -> int:
        return 0 if self.cache is None else await self.cache.clear()

    async def _end_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
