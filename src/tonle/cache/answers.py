"""What every place for answers offers, and counts: memory of this process (`ResponseCache`) or Redis (`RedisCache`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tonle.cache.flight import CachedResponse, Flight


@dataclass(slots=True)
class CacheStats:
    hits: int = 0
    misses: int = 0
    shared: int = 0  # hits that waited for an identical request
    evictions: int = 0
    expirations: int = 0
    errors: int = 0  # trips to a server that failed: misses, or answers not kept

    @property
    def hit_rate(self) -> float:
        """0 before the first lookup."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class Answers(Protocol):
    """One per gateway; used on one event loop."""

    stats: CacheStats

    @property
    def num_entries(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    async def find(self, name: bytes) -> CachedResponse | Flight:
        """An answer, perhaps after a wait for an identical request; or a flight: the caller must compute, and land it."""

    async def forget_all(self) -> int:
        """Returns how many answers were dropped. Computations under way go on, and are kept when they end."""

    async def close(self) -> None:
        """What is being kept is kept first."""
