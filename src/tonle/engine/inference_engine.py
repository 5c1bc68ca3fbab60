"""`InferenceEngine`: a model in your own process, thread-safe, with or without asyncio.

It has two threads of its own: one runs the loop, one runs the front's event loop. Callers never touch either.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, Self, TypeVar

from tonle.config.adapter_names import check_not_models
from tonle.config.engine import EngineConfig
from tonle.engine.adapters.engine_adapters import EngineAdapters
from tonle.engine.build import build
from tonle.engine.engine_embeddings import EngineEmbeddings
from tonle.engine.engine_sleep import EngineSleep
from tonle.engine.engine_stats import EngineStats
from tonle.engine.front import Front
from tonle.engine.generation import Generation
from tonle.engine.given_model import open_given
from tonle.engine.kept_results import KeptResults
from tonle.engine.loop import Loop
from tonle.engine.machine import give_back
from tonle.engine.mailbox import ThreadMailbox
from tonle.engine.messages import DropCache, Failed, Step, Stop, ToFront
from tonle.engine.request import (
    Delta,
    GenerationConfig,
    GenerationResult,
    RequestPriority,
)
from tonle.engine.text import Text
from tonle.engine.text.no_text import NoText
from tonle.errors import ConfigError, InternalError, InvalidRequest, TonleError
from tonle.telemetry import logs

log = logging.getLogger("tonle.engine")

T = TypeVar("T")

Prompt = str | list[int] | list[dict[str, Any]]  # text, token ids, or chat messages
DRAIN_S = 30.0  # as a server waits
_DRAIN_POLL_S = 0.005

_running: weakref.WeakSet[InferenceEngine] = weakref.WeakSet()
_leaving = threading.Event()  # the interpreter ends


class _Order(NamedTuple):
    """A request, as it is handed to the front."""

    prompt: list[int]
    config: GenerationConfig
    priority: RequestPriority
    adapter: str | None


class InferenceEngine(EngineAdapters, EngineEmbeddings, EngineSleep):
    """Continuous batching over one model. `model` is a transformers model, a path, a hub name or None (the default model).

    A transformers model without a tokenizer takes prompts as token ids; its results have `output_ids` and no text.
    """

    def __init__(self, model: Any = None, tokenizer: Any = None, config: EngineConfig | None = None) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"config must be an EngineConfig, not {config!r}", param="config")
        self.config = replace(config or EngineConfig())  # a copy: later edits of the caller's do not reach us
        self.config.validate()
        self._model = model
        self._tokenizer = tokenizer
        self._status = "stopped"
        self._front: Front | None = None
        self._mailbox: ThreadMailbox | None = None
        self._aio = asyncio.new_event_loop()
        self._threads: list[threading.Thread] = []
        self._results = KeptResults()
        self._generations: dict[str, Generation] = {}
        self._stats = EngineStats(self.config)

    # -- life

    def start(self) -> Self:
        """Load the model if need be and begin to serve. Calling it twice is harmless."""
        if self._status == "running":
            return self
        if self._aio.is_closed():
            self._aio = asyncio.new_event_loop()
        logs.follow(self.config.log_level)
        self._stats.begin()
        model, text, name = open_given(self._model, self._tokenizer, self.config)
        check_not_models(self.config.lora, name)
        self._mailbox = ThreadMailbox(self._hand_over)
        loop, card = build(model, self.config, self._mailbox, text=text, on_rank_lost=self._lose_rank)
        self._front = Front(text, name, self._mailbox.put, hold_clusters=self.config.hold_clusters)
        self._front.deliver(loop.adapters)
        self._front.deliver(card)
        self._threads = [
            threading.Thread(target=self._run_front, name="tonle-front", daemon=True),
            threading.Thread(target=self._run_loop, args=(loop,), name="tonle-engine", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._status = "running"
        _running.add(self)
        return self

    def stop(self, drain_s: float = DRAIN_S) -> None:
        """Take no more requests, let those under way finish for up to `drain_s` seconds, cancel the rest, end both threads and
        give the model's memory back."""
        if self._status in ("stopped", "sleeping"):
            self._status = "stopped"
            return
        self._nap = None
        was_running, self._status = self._status == "running", "stopping"
        assert self._mailbox is not None and self._front is not None
        try:
            until_s = time.monotonic() + drain_s
            while was_running and self._front.num_live and time.monotonic() < until_s:
                time.sleep(_DRAIN_POLL_S)
        finally:  # also after Ctrl-C
            self._status = "stopped"
            _running.discard(self)
            self._mailbox.put(Stop())
            self._threads[1].join()
            self._aio.call_soon_threadsafe(self._shut_down)
            self._threads[0].join()
            self._aio.close()
            give_back()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """After an error nothing is waited for."""
        self.stop(DRAIN_S if error is None else 0.0)

    # -- requests

    def submit_request(
        self,
        text: Prompt,
        generation_config: GenerationConfig | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        callback: Callable[[GenerationResult], None] | None = None,
        *,
        config: GenerationConfig | None = None,
        adapter: str | None = None,
    ) -> str:
        """Queue a request from any thread and return its id. `callback` gets the result on a thread of ours.

        `adapter`: the name of a LoRA adapter that it is computed with; None = the model as it is.
        """
        order = self._prepare(text, generation_config, config, priority=priority, adapter=adapter)
        request_id, future = self._call(self._begin(order, callback)).result()
        self._results.add(request_id, future)
        return request_id

    def begin(
        self, text: Prompt, config: GenerationConfig | None, callback: Callable[[GenerationResult], None] | None,
        adapter: str | None = None,
    ) -> tuple[str, Future[GenerationResult]]:  # fmt: skip
        """As `submit_request`, for a caller that keeps the future: it is not among those that `result` knows."""
        return self._call(self._begin(self._prepare(text, config, adapter=adapter), callback)).result()

    @property
    def is_running(self) -> bool:
        return self._status == "running"

    @property
    def front(self) -> Front:
        """For code that runs on the front's event loop, by `on_front`. Raises if the engine does not run."""
        if self._status == "failed":
            raise InternalError("the engine has ended with an error (see the log): stop() it, then start() it again")
        if self._status != "running" or self._front is None:
            raise ConfigError("the engine is not running: call start() first, or use it as a context manager")
        return self._front

    def on_front(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it on the front's event loop, where `front` may be used. Cancelling the future cancels it."""
        return self._call(coroutine)

    def result(self, request_id: str, timeout: float | None = None) -> GenerationResult:
        """Wait for a request. Raises `TimeoutError`, or what ended it."""
        return self._results.wait(request_id, timeout)

    def cancel(self, request_id: str) -> bool:
        """Stop a request and free what it holds. True if it was still under way; its result then says "cancelled"."""
        generation = self._generations.get(request_id)
        if generation is None:
            return False
        self._aio.call_soon_threadsafe(generation.cancel)
        return True

    async def submit_request_async(
        self,
        text: Prompt,
        generation_config: GenerationConfig | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        *,
        config: GenerationConfig | None = None,
        adapter: str | None = None,
    ) -> GenerationResult:
        """Await the result on any event loop. Cancelling the await cancels the request."""
        order = self._prepare(text, generation_config, config, priority=priority, adapter=adapter)
        return await asyncio.wrap_future(self._call(self._complete(order)))

    async def stream(
        self,
        text: Prompt,
        generation_config: GenerationConfig | None = None,
        priority: RequestPriority = RequestPriority.NORMAL,
        *,
        config: GenerationConfig | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Deltas as they are generated. Leaving the iteration early cancels the request."""
        order = self._prepare(text, generation_config, config, priority=priority, adapter=adapter)
        here = asyncio.get_running_loop()
        arrivals: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

        async def forward() -> None:
            generation = self._submit(order)
            end: BaseException | None = None
            try:
                async for delta in generation:
                    here.call_soon_threadsafe(arrivals.put_nowait, delta)
            except BaseException as error:
                end = error
            finally:
                generation.cancel()
                self._stats.add_request(generation)
                here.call_soon_threadsafe(arrivals.put_nowait, end)

        task = self._call(forward())
        try:
            while (item := await arrivals.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            task.cancel()

    # -- watching

    def get_stats(self) -> dict[str, Any]:
        """One snapshot of state, cache and recent performance, at any time: before `start` and after `stop`, too."""
        return self._stats.snapshot(self._status, self._front)

    def optimize_memory(self) -> None:
        """Forget recent answers and the cached blocks that no running request holds, at the next step. Return unused memory
        now."""
        if self._mailbox is not None:
            self._mailbox.put(DropCache())
        give_back()

    @property
    def tokenizer(self) -> Text:
        if self._front is None:
            raise ConfigError("the engine has not been started: call start() first")
        return self._front.text

    # -- inside

    def _prepare(
        self, text: Prompt, *configs: GenerationConfig | None, priority: RequestPriority = RequestPriority.NORMAL,
        adapter: str | None = None,
    ) -> _Order:  # fmt: skip
        """Tokens and settings, on the caller's thread."""
        prompt, config = self._encode(text, *configs)
        return _Order(prompt, config, priority, adapter)

    def _encode(self, text: Prompt, *configs: GenerationConfig | None) -> tuple[list[int], GenerationConfig]:
        front = self.front
        given = [c for c in configs if c is not None]
        if len(given) > 1:
            raise InvalidRequest("give generation_config or config, not both")
        config = given[0] if given else GenerationConfig()
        if not isinstance(config, GenerationConfig):
            raise InvalidRequest(f"config must be a GenerationConfig, not {config!r}", param="config")
        if isinstance(front.text, NoText):
            front.text.check_stops(config.stop)
        if isinstance(text, str):
            return front.text.encode(text), config
        if isinstance(text, list) and text and isinstance(text[0], dict):
            return front.prepare_chat(text, config)
        if isinstance(text, list) and all(isinstance(token, int) for token in text):
            return list(text), config  # type: ignore[arg-type]
        raise InvalidRequest("text must be a string, a list of token ids or a list of chat messages")

    def _submit(self, order: _Order) -> Generation:
        assert self._front is not None
        return self._front.submit(order.prompt, order.config, priority=order.priority, adapter=order.adapter)

    async def _complete(self, order: _Order) -> GenerationResult:
        generation = self._submit(order)
        self._generations[generation.request_id] = generation
        try:
            return await generation.result()
        finally:
            generation.cancel()
            del self._generations[generation.request_id]
            self._stats.add_request(generation)

    async def _begin(
        self, order: _Order, callback: Callable[[GenerationResult], None] | None
    ) -> tuple[str, Future[GenerationResult]]:
        generation = self._submit(order)
        self._generations[generation.request_id] = generation
        future: Future[GenerationResult] = Future()
        task = self._aio.create_task(self._finish(generation, future, callback))
        future.add_done_callback(lambda _: task)  # keeps the task alive until it is done
        return generation.request_id, future

    async def _finish(
        self, generation: Generation, future: Future[GenerationResult],
        callback: Callable[[GenerationResult], None] | None,
    ) -> None:  # fmt: skip
        error: TonleError | None = None
        try:
            result = await generation.result()
        except TonleError as ended_by:
            error, result = ended_by, generation.failed(ended_by)
        finally:
            self._generations.pop(generation.request_id, None)
            self._stats.add_request(generation)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        if callback is not None:
            try:
                await (asyncio.to_thread(callback, result) if not _leaving.is_set() else _call_here(callback, result))
            except Exception:
                log.exception("the callback of request %s raised", generation.request_id)

    def _hand_over(self, message: ToFront) -> None:
        """From the loop's thread to the front's."""
        self._aio.call_soon_threadsafe(self._deliver, message)

    def _deliver(self, message: ToFront) -> None:
        assert self._front is not None
        if isinstance(message, Step):
            self._stats.add_step(message)
        elif isinstance(message, Failed):
            self._stats.end(self._front.stats)
        self._front.deliver(message)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._aio)

    def _run_front(self) -> None:
        asyncio.set_event_loop(self._aio)
        self._aio.run_forever()

    def _run_loop(self, loop: Loop) -> None:
        try:
            loop.run()
        except Exception as error:
            log.exception("the engine's loop ended")
            self._status = "failed"
            self._hand_over(Failed(str(error), caller_fault=False))

    def _lose_rank(self, reason: str) -> None:
        """On a thread of the ranks: the loop may wait for a step that will not end."""
        log.error("%s; the engine has ended", reason)
        self._status = "failed"
        self._hand_over(Failed(reason, caller_fault=False))
        if self._mailbox is not None:
            self._mailbox.put(Stop())

    def _shut_down(self) -> None:
        """On the front's thread: tell all waiting callers, let them run once more, and stop."""
        assert self._front is not None
        if self._front.ready:
            self._stats.end(self._front.stats)
        self._front.lose(InternalError("stop() was called"))
        self._aio.call_later(0.05, self._aio.stop)


async def _call_here(callback: Callable[[GenerationResult], None], result: GenerationResult) -> None:
    """The interpreter is ending, and starts no more threads."""
    callback(result)


@atexit.register
def _stop_all() -> None:
    """torch must not be at work in a thread while the interpreter is taken down: it aborts the program."""
    _leaving.set()
    for engine in list(_running):
        engine.stop(drain_s=0.0)
