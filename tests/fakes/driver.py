"""Drive an engine loop by hand: no threads, no clock, every step in order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tonle.config.engine import EngineConfig
from tonle.engine.build import build
from tonle.engine.mailbox import ThreadMailbox
from tonle.engine.messages import AdapterReply, Adapters, LoadAdapter, Step, Submit, ToFront, UnloadAdapter
from tonle.engine.request import GenerationConfig, Request


@dataclass
class Driver:
    """One engine and everything it said."""

    model: Any
    config: EngineConfig = field(default_factory=EngineConfig)
    lag: int = 0
    compiler: Any = None  # of constraints, in place of the engine's own

    def __post_init__(self) -> None:
        if self.config.memory_pool_size == EngineConfig().memory_pool_size:
            # `verify` after every step recounts the whole pool: keep it small.
            self.config = replace(self.config, memory_pool_size=16 * 2**20)
        self.steps: list[Step] = []
        self.replies: list[AdapterReply] = []
        self.mailbox = ThreadMailbox(self._receive)
        self.loop, self.card = build(self.model, self.config, self.mailbox, lag=self.lag)
        if self.compiler is not None:
            self.loop._compiler = self.compiler
        self._next = 0

    def ask(
        self, prompt: list[int], config: GenerationConfig, adapter: str | None = None, *, grammar: str = ""
    ) -> Request:
        """A request as a front makes it."""
        self._next += 1
        known = {info.name: info for info in self.loop.adapters.adapters}
        info = None if adapter is None else known[adapter]
        return Request(handle=self._next, prompt=prompt, config=config.resolved(), seed=config.seed or 0,
                       salt=b"" if info is None else info.digest.encode(), adapter=0 if info is None else info.id,
                       grammar=grammar)  # fmt: skip

    def load(self, name: str, path: str, *, replace: bool = False) -> AdapterReply:
        return self._tell(LoadAdapter(1, name, path, replace))

    def unload(self, name: str) -> AdapterReply:
        return self._tell(UnloadAdapter(1, name))

    def _tell(self, message: LoadAdapter | UnloadAdapter) -> AdapterReply:
        self.replies.clear()
        self.mailbox.put(message)
        for _ in range(10_000):
            self.loop.step()
            if self.replies:
                return self.replies[0]
        raise AssertionError("no reply came")

    def generate(
        self,
        prompts: list[list[int]],
        config: GenerationConfig,
        *,
        arrive_every: int = 0,
        adapters: list[str | None] | None = None,
    ) -> list[list[int]]:
        """Run all prompts to their end; `arrive_every` steps lie between two arrivals (0 = all at once)."""
        names = adapters or [None] * len(prompts)
        return self.run(
            [self.ask(prompt, config, name) for prompt, name in zip(prompts, names, strict=True)], arrive_every
        )

    def run(self, requests: list[Request], arrive_every: int = 0) -> list[list[int]]:
        outputs: dict[int, list[int]] = {request.handle: [] for request in requests}
        left = set(outputs)
        queue = list(requests)
        seen = len(self.steps)
        for step in range(100_000):
            while queue and (not arrive_every or step % arrive_every == 0):
                self.mailbox.put(Submit([queue.pop(0)]))
                if arrive_every:
                    break
            self.loop.step()
            self.loop._scheduler.verify()
            for message in self.steps[seen:]:
                assert not message.refused, message.refused
                offset = 0
                for handle, count in zip(message.handles, message.counts, strict=True):
                    outputs[handle] += message.tokens[offset : offset + count]
                    offset += count
                left -= set(message.finished)
            seen = len(self.steps)
            if not left:
                return [outputs[request.handle] for request in requests]
        raise AssertionError("it never ended")

    def embed(
        self,
        prompts: list[list[int]],
        pooling: str,
        *,
        arrive_every: int = 0,
        adapters: list[str | None] | None = None,
        use_cache: bool = True,
    ) -> list[np.ndarray]:
        """The vectors of all prompts."""
        names = adapters or [None] * len(prompts)
        config = GenerationConfig(max_length=0, use_cache=use_cache)
        requests = [self.ask(prompt, config, name) for prompt, name in zip(prompts, names, strict=True)]
        for request in requests:
            request.pooling = pooling
        before = len(self.steps)
        assert self.run(requests, arrive_every) == [[]] * len(prompts), "an embedding has no tokens"
        found: dict[int, bytes] = {}
        for step in self.steps[before:]:
            assert found.keys().isdisjoint(step.embeddings)
            found |= step.embeddings
        return [np.frombuffer(found[request.handle], dtype="<f4") for request in requests]

    @property
    def stats(self) -> Any:
        return self.steps[-1].stats

    def _receive(self, message: ToFront) -> None:
        if isinstance(message, AdapterReply):
            self.replies.append(message)
        elif isinstance(message, Step):
            self.steps.append(message)
        else:
            assert isinstance(message, Adapters)
