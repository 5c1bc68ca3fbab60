"""`UsageSaver`: what keys used today outlives a gateway that counts in memory.

Does: read it from the store at the start, add to it every few seconds and at the end. Does not: count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from tonle.gateway.limits.memory_limiter import MemoryLimiter

log = logging.getLogger("tonle.gateway")

SAVE_S = 2.0


class UsageStore(Protocol):
    """Tokens by day (UTC, as 2026-01-31) and key."""

    async def usage(self, day: str) -> dict[str, int]: ...

    async def add_usage(self, day: str, tokens: Mapping[str, int]) -> None: ...


class UsageSaver:
    def __init__(self, limiter: MemoryLimiter, store: UsageStore) -> None:
        self._limiter = limiter
        self._store = store
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        day = self._limiter.today()
        self._limiter.load(day, await self._store.usage(day))
        self._task = asyncio.create_task(self._save_often())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await self._save()

    async def _save_often(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            try:
                await self._save()
            except Exception:
                log.exception("what keys used could not be saved; trying again")

    async def _save(self) -> None:
        limiter = self._limiter
        unsaved, limiter.unsaved = limiter.unsaved, {}
        try:
            for day in {day for day, _ in unsaved}:
                tokens = {key_id: used for (its_day, key_id), used in unsaved.items() if its_day == day}
                await self._store.add_usage(day, tokens)
        except Exception:
            for place, used in unsaved.items():
                limiter.unsaved[place] = limiter.unsaved.get(place, 0) + used
            raise
