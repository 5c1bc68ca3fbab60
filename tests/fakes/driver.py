"""Drive an engine loop by hand: no threads, no clock, every step in order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tonle.config.engine import EngineConfig
from tonle.engine.build import build
from tonle.engine.mailbox import ThreadMailbox
from tonle.engine.messages import Step, Submit, ToFront
from tonle.engine.request import GenerationConfig, Request


@dataclass
class Driver:
    """One engine and everything it said."""

    model: Any
    config: EngineConfig = field(default_factory=EngineConfig)
    lag: int = 0

    def __post_init__(self) -> None:
        if self.config.memory_pool_size == EngineConfig().memory_pool_size:
            # `verify` after every step recounts the whole pool: keep it small.
            self.config = replace(self.config, memory_pool_size=16 * 2**20)
        self.steps: list[Step] = []
        self.mailbox = ThreadMailbox(self._receive)
        self.loop, self.card = build(self.model, self.config, self.mailbox, lag=self.lag)
        self._next = 0

    def generate(self, prompts: list[list[int]], config: GenerationConfig, *, arrive_every: int = 0) -> list[list[int]]:
        """Run all prompts to their end; `arrive_every` steps lie between two arrivals (0 = all at once)."""
        requests = []
        for prompt in prompts:
            self._next += 1
            requests.append(Request(handle=self._next, prompt=prompt, config=config.resolved(), seed=config.seed or 0))
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
                for handle, token in zip(message.handles, message.tokens, strict=True):
                    outputs[handle].append(token)
                left -= set(message.finished)
            seen = len(self.steps)
            if not left:
                return [outputs[request.handle] for request in requests]
        raise AssertionError("it never ended")

    @property
    def stats(self) -> Any:
        return self.steps[-1].stats

    def _receive(self, message: ToFront) -> None:
        assert isinstance(message, Step)
        self.steps.append(message)
