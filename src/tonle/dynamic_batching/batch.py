"""`Batch`: the items that are computed together, and `BatchInfo`: what there is to know about them.

Does: keep items in numbered slots, count tokens, padding and memory, let items leave. Does not: choose items.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tonle.dynamic_batching.batching_config import BatchingStrategy


@dataclass(slots=True, eq=False)
class Item:
    """One thing that waits. `key`: lower is more urgent; it never changes, so sorted structures stay sorted."""

    id: int
    request: Any
    length: int  # tokens, frames, pixels: whatever is padded
    added_s: float  # monotonic
    key: float
    deadline_s: float | None = None  # monotonic
    waiting: bool = True  # False: taken, cancelled or expired; structures skip it


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInfo:
    """A batch as it was formed."""

    strategy: BatchingStrategy
    size: int
    lengths: tuple[int, ...]  # of its items, in slot order
    padded_length: int  # tokens every item is padded to; with CONTINUOUS the longest item, and nothing is padded
    real_tokens: int
    padded_tokens: int  # real ones and padding
    estimated_mb: float | None  # MiB; None without a memory estimator
    oldest_wait_s: float
    expired: tuple[Any, ...] = ()  # requests whose deadline passed before they could be in a batch

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that is padding: 0 = none."""
        return 1.0 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0


@dataclass(slots=True)
class Room:
    """What a batch may still take. All of its limits are checked in one place, `fits`."""

    max_items: int
    max_tokens: int
    max_mb: float
    sequence_mb: Callable[[int], float] | None  # MiB of one item of this length
    is_padded: bool
    items: dict[int, Item] = field(default_factory=dict)  # by slot
    free_slots: list[int] = field(default_factory=list)  # below the number of slots ever used; a heap
    is_running: bool = False  # its arrays have been padded: items that are longer cannot join
    longest: int = 0
    real_tokens: int = 0
    real_mb: float = 0.0

    def fits(self, length: int) -> bool:
        """Whether one more item of this length keeps every limit."""
        if self.is_running and self.is_padded and self.items and length > self.longest:
            return False
        size, longest = len(self.items) + 1, max(self.longest, length)
        tokens = size * longest if self.is_padded else self.real_tokens + length
        if size > self.max_items or tokens > self.max_tokens:
            return False
        if self.sequence_mb is None:
            return True
        mb = size * self.sequence_mb(longest) if self.is_padded else self.real_mb + self.sequence_mb(length)
        return mb <= self.max_mb

    def add(self, item: Item) -> int:
        """Into the lowest free slot, which is returned."""
        slot = heapq.heappop(self.free_slots) if self.free_slots else len(self.items)
        self.items[slot] = item
        self.longest = max(self.longest, item.length)
        self.real_tokens += item.length
        if self.sequence_mb is not None:
            self.real_mb += self.sequence_mb(item.length)
        return slot

    def remove(self, slot: int) -> Item:
        """`longest` stays: the padded arrays of a running batch do not shrink, unless nothing is left in it."""
        item = self.items.pop(slot)
        heapq.heappush(self.free_slots, slot)
        self.real_tokens -= item.length
        if self.sequence_mb is not None:
            self.real_mb -= self.sequence_mb(item.length)
        if not self.items:
            self.longest, self.real_tokens, self.real_mb = 0, 0, 0.0
        return item

    def info(self, strategy: BatchingStrategy, expired: tuple[Any, ...], now_s: float) -> BatchInfo:
        items = list(self.items.values())
        padded = len(items) * self.longest if self.is_padded else self.real_tokens
        mb = None
        if self.sequence_mb is not None:
            mb = len(items) * self.sequence_mb(self.longest) if self.is_padded and items else self.real_mb
        return BatchInfo(
            strategy=strategy,
            size=len(items),
            lengths=tuple(item.length for item in items),
            padded_length=self.longest,
            real_tokens=self.real_tokens,
            padded_tokens=padded,
            estimated_mb=mb,
            oldest_wait_s=max((now_s - item.added_s for item in items), default=0.0),
            expired=expired,
        )


class Batch(Sequence[Any]):
    """The requests of a batch, each in a slot that it keeps: `batch[slot]`. At first the slots are 0, 1, 2, …

    Iterating and `len` leave out slots whose item has finished. Thread-safe.
    """

    def __init__(self, room: Room, lock: threading.Condition, fill: Callable[[Room], list[Item]] | None) -> None:
        """`lock` is the batcher's; `fill` moves waiting items into the room, None: none may join."""
        self._room = room
        self._lock = lock
        self._fill = fill

    def __len__(self) -> int:
        return len(self._room.items)

    def __iter__(self) -> Iterator[Any]:
        with self._lock:
            return iter([item.request for _, item in sorted(self._room.items.items())])

    def __getitem__(self, slot: Any) -> Any:
        if isinstance(slot, slice):
            return list(self)[slot]
        with self._lock:
            return self._item(slot).request

    def slots(self) -> list[int]:
        """Those in use."""
        with self._lock:
            return sorted(self._room.items)

    def finish(self, slot: int) -> Any:
        """The item is done and leaves the batch; its slot and memory are free for `join`. Returns its request."""
        with self._lock:
            self._item(slot)
            return self._room.remove(slot).request

    def join(self) -> list[int]:
        """Fill free places with waiting items, and return their slots. Padded batches take items no longer than they are
        padded to; with `enable_continuous_batching` off, none joins."""
        if self._fill is None:
            return []
        with self._lock:
            before = set(self._room.items)
            self._fill(self._room)
            return sorted(set(self._room.items) - before)

    def _item(self, slot: int) -> Item:
        item = self._room.items.get(slot)
        if item is None:
            raise IndexError(f"no item is in slot {slot!r}; slots in use: {sorted(self._room.items)}")
        return item
