"""`OptimizedEngine`: questions in, answers and their facts out, from any thread and any event loop.

Does: check what callers give, and bring requests to the engine's event loop and answers back. Does not: run them
(`request_runner.py`).
"""

from __future__ import annotations

import _thread
import asyncio
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self

from tonle.cache import may_reuse
from tonle.config.setting_names import unknown_setting
from tonle.engine.request import GenerationConfig
from tonle.errors import InvalidRequest
from tonle.inference_optimizer.inference_config import InferenceConfig
from tonle.inference_optimizer.prompt import Message, conversation
from tonle.inference_optimizer.request_runner import ChatRequest, RequestRunner
from tonle.inference_optimizer.streamed_answer import StreamedAnswer

# An answer is one text, and `use_cache` has its own parameter.
_NOT_HERE = ("n", "logprobs", "prompt_logprobs", "use_cache")
_LENGTHS = ("max_tokens", "max_length")


class OptimizedEngine:
    """Made by `create_optimized_engine`. Thread-safe. Close it, use it with `with`, or let it be garbage-collected."""

    def __init__(self, runner: RequestRunner, config: InferenceConfig) -> None:
        self.config = replace(config)
        self._runner = runner
        # The threads know the runner alone, so that an engine that is no longer used can be freed.
        self._finalizer = weakref.finalize(self, _close_soon, runner)
        self._finalizer.atexit = False  # engines end with the interpreter by themselves

    @property
    def model(self) -> str:
        """Its name."""
        return self._runner.model

    def generate(
        self,
        user_input: str,
        conversation_history: Sequence[Message] | None = None,
        use_cache: bool | None = None,
        **sampling: Any,
    ) -> tuple[str, dict[str, Any]]:
        """The response and its metadata. `sampling`: fields of `GenerationConfig`, such as `max_tokens=50`.

        `use_cache`: None = if the request would get the same answer again (temperature 0, or a seed); True = always, so
        that a sampled answer is repeated; False = neither read nor store.
        """
        future = self._begin(user_input, conversation_history, use_cache, sampling)
        try:
            return future.result()
        except BaseException:  # such as Ctrl-C
            future.cancel()
            raise

    async def generate_async(
        self,
        user_input: str,
        conversation_history: Sequence[Message] | None = None,
        use_cache: bool | None = None,
        **sampling: Any,
    ) -> tuple[str, dict[str, Any]]:
        """As `generate`, on any event loop, which it does not block. Cancelling the await cancels the request."""
        return await asyncio.wrap_future(self._begin(user_input, conversation_history, use_cache, sampling))

    def stream(
        self,
        user_input: str,
        conversation_history: Sequence[Message] | None = None,
        use_cache: bool | None = None,
        **sampling: Any,
    ) -> StreamedAnswer:
        """As `generate`, piece by piece, with `for` or `async for`. An answer from the cache is one piece."""
        request = self._request(user_input, conversation_history, use_cache, sampling)
        return StreamedAnswer(lambda on_text: self._runner.begin(request, on_text), owner=self)

    def get_metrics(self) -> dict[str, Any]:
        """One snapshot, at once: counts since the start; latencies, rates and the target over the metrics window."""
        runner = self._runner
        metrics = runner.metrics.report()
        metrics["in_progress"] = runner.num_running
        metrics["cache"] = {"enabled": runner.cache is not None}
        if (cache := runner.cache) is not None:
            stats = cache.stats
            metrics["cache"] |= {"num_entries": cache.num_entries, "num_bytes": cache.num_bytes, "hits": stats.hits,
                                 "misses": stats.misses, "shared": stats.shared}  # fmt: skip
        return metrics

    def clear_cache(self) -> int:
        """Forget all cached answers; returns how many. Requests in progress continue and are stored when they end."""
        return self._runner.clear_cache()

    def close(self) -> None:
        """End what still runs, and give the model's memory back. Calling it twice is harmless."""
        self._finalizer.detach()
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, *given: Any) -> Future[tuple[str, dict[str, Any]]]:
        return self._runner.begin(self._request(*given))

    def _request(self, user_input: object, history: object, use_cache: object, sampling: dict[str, Any]) -> ChatRequest:
        """Raises `InvalidRequest`, `TypeError`."""
        if use_cache is not None and not isinstance(use_cache, bool):
            raise InvalidRequest(f"use_cache must be True, False or None, not {use_cache!r:.60}", param="use_cache")
        talk = conversation(user_input, history, self.config.system_prompt)
        config = generation_config(sampling, self.config)
        wanted = may_reuse({"seed": config.seed, "do_sample": config.do_sample, "temperature": config.temperature})
        if self._runner.cache is None or use_cache is False or not (use_cache or wanted):
            return ChatRequest(talk, config, key=None)
        try:
            return ChatRequest(talk, config, self._runner.key_of(talk, config))
        except TypeError as error:
            raise InvalidRequest(
                f"conversation_history must hold strings, numbers, lists and dicts only: {error}",
                param="conversation_history",
            ) from None


def generation_config(sampling: dict[str, Any], defaults: InferenceConfig) -> GenerationConfig:
    """Raises `TypeError` for names that do not exist, `InvalidRequest` for values that make no sense."""
    known = [name for name in GenerationConfig.__struct_fields__ if name not in _NOT_HERE]
    for name in sampling:
        if name not in known:
            raise TypeError(unknown_setting("generate()", name, known))
    given = dict(sampling)
    if all(given.get(name) is None for name in _LENGTHS):
        given = {name: value for name, value in given.items() if name not in _LENGTHS}
        given["max_length"] = defaults.max_tokens
    if given.get("temperature") is None:
        given["temperature"] = defaults.temperature
    if given.get("top_p") is None:
        given["top_p"] = defaults.top_p
    config = GenerationConfig(**given)
    config.validate()
    return config


def _close_soon(runner: RequestRunner) -> None:
    """A garbage collection may run on any thread, one of the engine's included, and inside any lock: it must not wait."""
    _thread.start_new_thread(runner.close, ())
