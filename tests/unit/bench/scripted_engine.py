"""An engine of the shape that `run_scenarios` takes: a response cache, and a record of what was asked and how."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class LibraryEngine:
    """`before_answer` is called with the number of the question; what it raises is raised."""

    def __init__(self, before_answer: Callable[[int], None] = lambda number: None) -> None:
        self.cached: set[str] = set()
        self.asked: list[tuple[str, bool]] = []
        self.running = self.most_running = 0
        self.settings: dict[str, Any] = {}
        self._before_answer = before_answer

    async def generate_async(
        self, user_input: str, *, use_cache: bool = True, **sampling: Any
    ) -> tuple[str, dict[str, Any]]:
        self.asked.append((user_input, use_cache))
        self.settings = sampling
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0.001)
            self._before_answer(len(self.asked))
        finally:
            self.running -= 1
        hit = use_cache and user_input in self.cached
        if use_cache:
            self.cached.add(user_input)
        return "an answer", {"latency": 0.001, "cache_hit": hit, "completion_tokens": 3, "model": "tiny"}
