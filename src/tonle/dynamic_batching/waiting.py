"""Waiting items, and which of them make the next batch: one class per strategy.

Does: keep items in order, choose a batch around the most urgent item, so that none starves. Does not: lock, wait, or
watch deadlines (`batcher.py`). Adding and taking an item is O(log n); items that were cancelled are skipped later.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

from tonle.dynamic_batching.batch import Item, Room
from tonle.dynamic_batching.batching_config import BatchingConfig, BatchingStrategy

MIN_SWEPT = 1024  # gone items that are not worth a sweep


class UrgencyHeap:
    """Items by urgency. Items that are gone stay in it until they come up."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []

    def __len__(self) -> int:
        """Gone items included."""
        return len(self._heap)

    def push(self, item: Item) -> None:
        heapq.heappush(self._heap, (item.key, item.id, item))

    def peek(self) -> Item | None:
        heap = self._heap
        while heap and not heap[0][2].waiting:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def sweep(self) -> None:
        """Drop items that are gone."""
        self._heap = [entry for entry in self._heap if entry[2].waiting]
        heapq.heapify(self._heap)


class Waiting:
    """The base, and with it NAIVE and CONTINUOUS: the most urgent first. CONTINUOUS differs in `Room.is_padded`."""

    def __init__(self, config: BatchingConfig) -> None:
        self._config = config
        self._by_urgency = UrgencyHeap()
        self.num_waiting = 0
        self._num_tokens = 0  # of all that wait

    def add(self, item: Item) -> None:
        self._by_urgency.push(item)
        self.num_waiting += 1
        self._num_tokens += item.length

    def drop(self, item: Item) -> None:
        """It does not wait any more."""
        item.waiting = False
        self.num_waiting -= 1
        self._num_tokens -= item.length
        if len(self._by_urgency) > 2 * self.num_waiting + MIN_SWEPT:
            self._sweep()

    def most_urgent(self) -> Item | None:
        return self._by_urgency.peek()

    def fill(self, room: Room) -> list[Item]:
        """Move items into `room`, the most urgent first: if that one does not fit, none does, so that it cannot starve."""
        taken: list[Item] = []
        while (item := self.most_urgent()) is not None and room.fits(item.length):
            self._take(item, room, taken)
        return taken

    def has_full_batch(self, room: Room) -> bool:
        """Waiting longer would not make the next batch larger."""
        return self.num_waiting >= room.max_items or self._num_tokens >= room.max_tokens

    def _take(self, item: Item, room: Room, taken: list[Item]) -> None:
        self.drop(item)
        room.add(item)
        taken.append(item)

    def _sweep(self) -> None:
        self._by_urgency.sweep()


class BucketedWaiting(Waiting):
    """The most urgent item, and others of its bucket by urgency."""

    def __init__(self, config: BatchingConfig) -> None:
        super().__init__(config)
        self._buckets: dict[int, UrgencyHeap] = {}
        self._num_in: dict[int, int] = {}  # waiting items of a bucket
        self._num_full = 0  # buckets with a whole batch in them

    def _bucket(self, length: int) -> int:
        return max(length - 1, 0) // self._config.bucket_size

    def add(self, item: Item) -> None:
        super().add(item)
        bucket = self._bucket(item.length)
        self._buckets.setdefault(bucket, UrgencyHeap()).push(item)
        self._count(bucket, 1)

    def drop(self, item: Item) -> None:
        super().drop(item)
        self._count(self._bucket(item.length), -1)

    def _count(self, bucket: int, change: int) -> None:
        before = self._num_in.get(bucket, 0)
        after, most = before + change, self._config.max_batch_size
        self._num_full += (after >= most) - (before >= most)
        if after:
            self._num_in[bucket] = after
        else:
            self._num_in.pop(bucket, None)

    def fill(self, room: Room) -> list[Item]:
        first = self.most_urgent()
        if first is None:
            return []
        heap = self._buckets[self._bucket(first.length)]
        taken: list[Item] = []
        while (item := heap.peek()) is not None and room.fits(item.length):
            self._take(item, room, taken)
        if heap.peek() is None:
            self._buckets.pop(self._bucket(first.length), None)
        return taken

    def has_full_batch(self, room: Room) -> bool:
        return self._num_full > 0

    def _sweep(self) -> None:
        super()._sweep()
        for bucket, heap in list(self._buckets.items()):
            heap.sweep()
            if not len(heap):
                del self._buckets[bucket]


class MemoryAwareWaiting(Waiting):
    """The most urgent item, then its neighbours in length: of the next shorter and the next longer, whichever adds less
    padding, until memory, tokens or places are used up."""

    def __init__(self, config: BatchingConfig) -> None:
        super().__init__(config)
        self._by_length: dict[int, UrgencyHeap] = {}
        self._lengths: list[int] = []  # keys of `_by_length`, sorted

    def add(self, item: Item) -> None:
        super().add(item)
        heap = self._by_length.get(item.length)
        if heap is None:
            heap = self._by_length[item.length] = UrgencyHeap()
            insort(self._lengths, item.length)
        heap.push(item)

    def fill(self, room: Room) -> list[Item]:
        taken: list[Item] = []
        item = self.most_urgent()
        if item is None or not room.fits(item.length):
            return taken
        anchor = item.length
        while item is not None and room.fits(item.length):
            self._take(item, room, taken)
            item = self._nearest(anchor, room)
        return taken

    def _nearest(self, anchor: int, room: Room) -> Item | None:
        """Of the items that fit, the one that adds the least padding."""
        shorter = self._next(anchor, -1)
        longer = self._next(anchor + 1, 1)
        if longer is not None and not room.fits(longer.length):
            longer = None
        if shorter is None or longer is None:
            return shorter or longer
        padding_if_shorter = room.longest - shorter.length
        padding_if_longer = len(room.items) * max(0, longer.length - room.longest)
        return shorter if padding_if_shorter <= padding_if_longer else longer

    def _next(self, length: int, step: int) -> Item | None:
        """The most urgent item of the nearest length: at most `length` if `step` is -1, at least `length` if it is 1."""
        while self._lengths:
            place = bisect_left(self._lengths, length + 1) - 1 if step < 0 else bisect_left(self._lengths, length)
            if not 0 <= place < len(self._lengths):
                return None
            found = self._lengths[place]
            item = self._by_length[found].peek()
            if item is not None:
                return item
            del self._lengths[place], self._by_length[found]
        return None

    def _sweep(self) -> None:
        super()._sweep()
        for heap in self._by_length.values():
            heap.sweep()
        self._by_length = {length: heap for length, heap in self._by_length.items() if len(heap)}
        self._lengths = sorted(self._by_length)


_CLASSES: dict[BatchingStrategy, type[Waiting]] = {
    BatchingStrategy.NAIVE: Waiting,
    BatchingStrategy.BUCKETED: BucketedWaiting,
    BatchingStrategy.MEMORY_AWARE: MemoryAwareWaiting,
    BatchingStrategy.CONTINUOUS: Waiting,
}


def waiting_for(config: BatchingConfig) -> Waiting:
    return _CLASSES[config.strategy](config)
