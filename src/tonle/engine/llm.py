"""`LLM`: whole batches offline, with a progress bar."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tonle.config.engine import EngineConfig
from tonle.config.setting_names import unknown_setting
from tonle.engine.embedding import Vector
from tonle.engine.engine_embeddings import Embeddable
from tonle.engine.inference_engine import InferenceEngine, Prompt
from tonle.engine.messages import AdapterInfo
from tonle.engine.request import GenerationConfig, GenerationResult
from tonle.engine.text import Text
from tonle.errors import InvalidRequest

_WINDOW = 4_096  # prompts under way: more than any batch holds, and few enough to keep in memory

Conversation = list[dict[str, Any]]  # messages with role and content, oldest first

# What device and model allow.
_SUITED = EngineConfig(memory_pool_size=None, max_batch_size=None, max_sequence_length=None)


class LLM:
    """A model ready to generate. Keyword arguments are fields of `EngineConfig`: `LLM("path", max_batch_size=64)`."""

    def __init__(
        self, model: Any = None, tokenizer: Any = None, config: EngineConfig | None = None, **settings: Any
    ) -> None:
        for name in settings:
            if name not in (known := EngineConfig.names()):
                raise TypeError(unknown_setting("LLM()", name, known))
        config = _SUITED if config is None else config
        if isinstance(config, EngineConfig):  # else the engine refuses it
            config = replace(config, **settings)
        self.engine = InferenceEngine(model, tokenizer, config).start()

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        config: GenerationConfig | None = None,
        *,
        progress: bool | None = None,
        adapter: str | None = None,
    ) -> list[GenerationResult]:
        """Continue each prompt (text, token ids, or chat messages); results come in the order of the prompts.

        `progress`: show a bar; None = if standard error is a terminal. `adapter`: the LoRA adapter that all are computed with.
        """
        return self._run(_as_batch(prompts), config, progress, adapter)

    def chat(
        self,
        messages: Conversation | list[Conversation],
        config: GenerationConfig | None = None,
        *,
        progress: bool | None = None,
        adapter: str | None = None,
    ) -> list[GenerationResult]:
        """Answer a conversation, `[{"role": "user", "content": "Hello"}]`, or each of a list of them; as `generate`."""
        return self._run(_as_conversations(messages), config, progress, adapter)

    def embed(
        self,
        texts: Embeddable | Sequence[Embeddable],
        pooling: str = "last",
        normalize: bool = True,
        *,
        adapter: str | None = None,
    ) -> Vector:
        """Vectors (N, hidden size) of N texts; of one text, (hidden size,). As of `InferenceEngine`."""
        return self.engine.embed(texts, pooling, normalize, adapter=adapter)

    def _run(
        self, batch: list[Prompt], config: GenerationConfig | None, progress: bool | None, adapter: str | None
    ) -> list[GenerationResult]:
        show = sys.stderr.isatty() if progress is None else progress
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
                   TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
            task = bar.add_task("", total=len(batch), rate="")
            tokens, lock = [0], threading.Lock()

            def finished(result: GenerationResult) -> None:
                with lock:
                    tokens[0] += result.usage.completion_tokens
                    elapsed = bar.tasks[0].elapsed or 0.0
                    bar.update(task, advance=1, rate=f"{tokens[0] / elapsed:.0f} tok/s" if elapsed else "")

            return self._run_in_windows(batch, config, finished, adapter)

    def _run_in_windows(
        self, batch: list[Prompt], config: GenerationConfig | None, finished: Callable[[GenerationResult], None],
        adapter: str | None,
    ) -> list[GenerationResult]:  # fmt: skip
        """Any number of prompts: the next one is submitted when fewer than `_WINDOW` are under way."""
        room = threading.BoundedSemaphore(_WINDOW)
        begun: list[tuple[str, Future[GenerationResult]]] = []
        try:
            for prompt in batch:
                room.acquire()
                begun.append(self.engine.begin(prompt, config, finished, adapter))
                begun[-1][1].add_done_callback(lambda _: room.release())
            return [future.result() for _, future in begun]
        except BaseException:
            for request_id, _ in begun:
                self.engine.cancel(request_id)
            raise

    @property
    def tokenizer(self) -> Text:
        return self.engine.tokenizer

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The LoRA adapters that `generate` and `chat` may name, by name."""
        return self.engine.adapters

    def load_adapter(self, name: str, path: str | os.PathLike[str], *, replace: bool = False) -> AdapterInfo:
        """As of `InferenceEngine`."""
        return self.engine.load_adapter(name, path, replace=replace)

    def unload_adapter(self, name: str) -> None:
        self.engine.unload_adapter(name)

    def close(self) -> None:
        self.engine.stop(drain_s=0.0)  # its calls wait for their results: what is left was given up

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_batch(prompts: Prompt | list[Prompt]) -> list[Prompt]:
    """One prompt or a list of them. A list of ints or of messages is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise InvalidRequest(f"prompts must be a string or a list, not {prompts!r}", param="prompts")
    if prompts and isinstance(prompts[0], int | dict):
        return [prompts]
    return list(prompts)  # type: ignore[arg-type]


def _as_conversations(messages: Conversation | list[Conversation]) -> list[Prompt]:
    """One conversation or a list of them."""
    conversations = (
        [messages] if isinstance(messages, list) and messages and isinstance(messages[0], dict) else messages
    )
    if not isinstance(conversations, list | tuple) or not all(_is_conversation(each) for each in conversations):
        raise InvalidRequest(
            'messages must be a conversation, [{"role": "user", "content": "Hello"}], or a list of conversations, '
            f"not {messages!r:.200}",
            param="messages",
        )
    return list(conversations)  # type: ignore[arg-type]


def _is_conversation(messages: object) -> bool:
    return isinstance(messages, list) and bool(messages) and all(isinstance(message, dict) for message in messages)
