"""`Tier`: one place that keeps KV blocks by their keys, and what is counted of it."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec


class TierCounts(msgspec.Struct, array_like=True):
    """Since the start; each number is changed under the lock of who counts."""

    num_blocks: int = 0  # that it has now, as far as this engine knows
    num_bytes: int = 0
    queries: int = 0  # blocks it was asked for
    hits: int = 0
    load_bytes: int = 0
    load_s: float = 0.0  # of hits
    save_bytes: int = 0
    save_s: float = 0.0
    evicted: int = 0  # blocks dropped for want of room
    damaged: int = 0  # blocks found short or with another checksum
    errors: int = 0  # times it could not be reached, read or written


class Tier(Protocol):
    """Called from several threads. Nothing here raises: what fails is a miss, or is not kept."""

    @property
    def name(self) -> str: ...
    @property
    def counts(self) -> TierCounts: ...

    def load(self, key: bytes, out: memoryview) -> bool:
        """The block into `out`, which has its size. False: it is not here."""
        ...

    def save(self, key: bytes, data: memoryview) -> None: ...
    def close(self) -> None: ...


def timed_load(tier: Tier, key: bytes, out: memoryview) -> bool:
    began = time.perf_counter()
    found = tier.load(key, out)
    counts = tier.counts
    counts.queries += 1
    if found:
        counts.hits += 1
        counts.load_bytes += len(out)
        counts.load_s += time.perf_counter() - began
    return found


def timed_save(tier: Tier, key: bytes, data: memoryview) -> None:
    began = time.perf_counter()
    tier.save(key, data)
    tier.counts.save_bytes += len(data)
    tier.counts.save_s += time.perf_counter() - began
