"""`DynamicBatcher`: items in from any thread, batches out to any thread.

Does: queue items, form batches by the strategy, wait for a batch to fill, let deadlines pass and items be cancelled.
Does not: run a model, or know what an item is.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from tonle.dynamic_batching.batch import Batch, BatchInfo, Item, Room
from tonle.dynamic_batching.batching_config import BatchingConfig, BatchingStrategy
from tonle.dynamic_batching.waiting import MIN_SWEPT, waiting_for
from tonle.errors import ConfigError, InvalidRequest

NORMAL = 2  # of `tonle.RequestPriority`: lower goes first


class Estimator(Protocol):
    """What tells how much memory an item needs. `MemoryEstimator` does."""

    def sequence_mb(self, length: int) -> float:
        """MiB of one item in a batch whose items are this long. Must not fall as `length` grows."""
        ...


class DynamicBatcher:
    """Every item that was added leaves exactly once: in a batch, as expired, or cancelled. Thread-safe."""

    def __init__(self, config: BatchingConfig | None = None, memory_estimator: Estimator | None = None) -> None:
        """Raises `ConfigError`."""
        self.config = replace(config or BatchingConfig())
        self.config.validate()
        if self.config.strategy is BatchingStrategy.MEMORY_AWARE and memory_estimator is None:
            raise ConfigError(
                "strategy MEMORY_AWARE needs a memory estimator: DynamicBatcher(config, MemoryEstimator.of(model)), or "
                "choose BUCKETED, which needs none",
                param="memory_estimator",
            )
        self._sequence_mb = (
            None if memory_estimator is None else functools.lru_cache(4096)(memory_estimator.sequence_mb)
        )
        self._waiting = waiting_for(self.config)
        self._items: dict[int, Item] = {}  # that wait
        self._deadlines: list[tuple[float, int]] = []  # a heap: monotonic s, id
        self._expired: list[Any] = []  # requests, not yet reported
        self._ids = itertools.count(1)
        self._closed = False
        self._changed = threading.Condition(threading.RLock())

    def __len__(self) -> int:
        """Items that wait."""
        return self._waiting.num_waiting

    # -- in

    def add_item(self, request: Any, seq_len: int, *, priority: int = NORMAL, deadline_ms: float | None = None) -> int:
        """Queue one item; returns an id for `cancel`. `deadline_ms`: from now; later it expires instead of running.

        Raises `InvalidRequest` for an item that no batch could hold.
        """
        with self._changed:
            item = self._add(request, seq_len, priority, deadline_ms)
            self._changed.notify_all()
        return item.id

    def add_items(
        self, items: Iterable[tuple[Any, int]], *, priority: int = NORMAL, deadline_ms: float | None = None
    ) -> list[int]:
        """Queue all of them, or none: raises `InvalidRequest` if one cannot be batched, `TypeError` if one is no pair."""
        checked = [(request, self._checked(length)) for request, length in map(_pair, items)]
        with self._changed:
            ids = [self._add(request, length, priority, deadline_ms).id for request, length in checked]
            self._changed.notify_all()
        return ids

    def cancel(self, item_id: int) -> bool:
        """False if it does not wait any more."""
        with self._changed:
            item = self._items.pop(item_id, None)
            if item is not None:
                self._waiting.drop(item)
            return item is not None

    def close(self) -> None:
        """Take no more items. What waits still comes out, without waiting for batches to fill; then empty batches do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- out

    def get_next_batch(self, timeout_ms: float = 0.0) -> tuple[Batch, BatchInfo]:
        """The next batch; an empty one if there is none within `timeout_ms`.

        A batch is ready when it is full, or when its most urgent item has waited `batch_timeout_ms`.
        """
        ends_s = time.monotonic() + timeout_ms / 1000
        with self._changed:
            while True:
                now_s = time.monotonic()
                self._expire(now_s)
                ready_s = self._ready_s(now_s)
                if ready_s is not None and ready_s <= now_s:
                    return self._form(now_s)
                if now_s >= ends_s or (self._closed and not len(self)):
                    return self._form(now_s, most_items=0)
                self._changed.wait(self._pause_s(now_s, ends_s, ready_s))

    def ready_in_s(self) -> float | None:
        """Seconds until a batch is ready, for an event loop, which cannot wait in `get_next_batch`: 0 if one is, None if
        nothing waits. An item that is added or cancelled meanwhile may change it."""
        with self._changed:
            now_s = time.monotonic()
            self._expire(now_s)
            ready_s = self._ready_s(now_s)
            if ready_s is None:
                return None
            next_deadline_s = self._deadlines[0][0] if self._deadlines else ready_s
            return max(0.0, min(ready_s, next_deadline_s) - now_s)

    @property
    def closed(self) -> bool:
        """And empty: no batch will come any more."""
        return self._closed and not len(self)

    # -- inside, with the lock held

    def _checked(self, length: int) -> int:
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise InvalidRequest(f"seq_len must be an integer of at least 1, not {length!r}", param="seq_len")
        if length > self.config.max_total_tokens:
            raise InvalidRequest(
                f"an item of {length} tokens fits no batch: max_total_tokens is {self.config.max_total_tokens}",
                param="seq_len",
            )
        if self._sequence_mb is not None and self._sequence_mb(length) > self.config.memory_limit_mb:
            raise InvalidRequest(
                f"an item of {length} tokens fits no batch: it needs about {self._sequence_mb(length):.0f} MB, and "
                f"memory_limit_mb is {self.config.memory_limit_mb:g}",
                param="seq_len",
            )
        return length

    def _add(self, request: Any, length: int, priority: int, deadline_ms: float | None) -> Item:
        if self._closed:
            raise InvalidRequest("the batcher was closed and takes no more items")
        now_s = time.monotonic()
        item = Item(next(self._ids), request, self._checked(length), now_s,
                    now_s + priority * self.config.priority_ageing_s)  # fmt: skip
        if deadline_ms is not None:
            item.deadline_s = now_s + deadline_ms / 1000
            heapq.heappush(self._deadlines, (item.deadline_s, item.id))
            if len(self._deadlines) > 2 * len(self._items) + MIN_SWEPT:  # of items that left long before
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._items or entry[1] == item.id]
                heapq.heapify(self._deadlines)
        self._items[item.id] = item
        self._waiting.add(item)
        return item

    def _expire(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, item_id = heapq.heappop(self._deadlines)
            item = self._items.pop(item_id, None)
            if item is not None:
                self._waiting.drop(item)
                self._expired.append(item.request)

    def _ready_s(self, now_s: float) -> float | None:
        """When the next batch may leave; None if nothing waits. Expired items are reported at once."""
        if self._expired:
            return now_s
        first = self._waiting.most_urgent()
        if first is None:
            return None
        if self._closed or self._waiting.has_full_batch(self._room()):
            return now_s
        return first.added_s + self.config.batch_timeout_ms / 1000

    def _pause_s(self, now_s: float, ends_s: float, ready_s: float | None) -> float:
        next_deadline_s = self._deadlines[0][0] if self._deadlines else ends_s
        return max(0.0, min(ends_s, next_deadline_s, ends_s if ready_s is None else ready_s) - now_s)

    def _room(self, most_items: int | None = None) -> Room:
        config = self.config
        return Room(
            max_items=config.max_batch_size if most_items is None else most_items,
            max_tokens=config.max_total_tokens,
            max_mb=config.memory_limit_mb,
            sequence_mb=self._sequence_mb,
            is_padded=config.strategy is not BatchingStrategy.CONTINUOUS,
        )

    def _form(self, now_s: float, most_items: int | None = None) -> tuple[Batch, BatchInfo]:
        room = self._room(most_items)
        self._fill(room)
        room.is_running = True
        expired, self._expired = tuple(self._expired), []
        join = self._fill if self.config.enable_continuous_batching and most_items is None else None
        return Batch(room, self._changed, join), room.info(self.config.strategy, expired, now_s)

    def _fill(self, room: Room) -> list[Item]:
        self._expire(time.monotonic())
        taken = self._waiting.fill(room)
        for item in taken:
            del self._items[item.id]
        return taken


def _pair(item: tuple[Any, int]) -> tuple[Any, int]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise TypeError(f"add_items takes pairs (request, length in tokens), such as ('Hello', 3), not {item!r:.60}")
    return item[0], item[1]
