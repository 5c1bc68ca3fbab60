"""The queue of waiting requests: priority, then arrival, with ageing. Sequences whose adapter has no slot stand aside in it."""

from __future__ import annotations

import heapq
from collections import Counter

from tonle.engine.request import Request
from tonle.engine.schedule.sequence import Sequence

_Entry = tuple[float, int, Sequence]  # key, handle


def order_key(request: Request, ageing_s: float) -> float:
    """A request of a lower priority is queued as if it had arrived later, by `ageing_s` per level.

    The key never changes, so the queue stays sorted, and no request starves: a LOW request is overtaken only by those that
    arrive within 3 * ageing_s after it.
    """
    return request.arrived_s + request.priority * ageing_s


class WaitingQueue:
    """Sequences without a row, best first. Cancelled ones are skipped when they come up. They hold nothing, but for those whose
    prefix was loaded (`loading.py`).

    A sequence that is set aside stays in the queue, but does not come up: it waits for its adapter (`AdapterSlots`).
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._aside: dict[int, list[_Entry]] = {}  # by adapter: heaps of those set aside
        self._waiting: dict[int, Sequence] = {}
        self.adapters: dict[int, int] = {}  # adapter -> how many wait with it, one at least

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, handle: int) -> bool:
        return handle in self._waiting

    def push(self, sequence: Sequence) -> None:
        self._waiting[sequence.request.handle] = sequence
        heapq.heappush(self._heap, (sequence.key, sequence.request.handle, sequence))
        if adapter := sequence.request.adapter:
            self.adapters[adapter] = self.adapters.get(adapter, 0) + 1

    def peek(self) -> Sequence | None:
        return self._first(self._heap)

    def pop(self) -> Sequence:
        sequence = self.peek()
        assert sequence is not None
        heapq.heappop(self._heap)
        self._leave(sequence)
        return sequence

    def take(self, handle: int) -> Sequence:
        """One of them, whatever its place. It may come back, so nothing of it stays."""
        sequence = self._waiting[handle]
        self._leave(sequence)
        adapter = sequence.request.adapter
        for heap in (self._heap, self._aside.get(adapter, [])):
            heap[:] = [entry for entry in heap if entry[2] is not sequence]
            heapq.heapify(heap)
        return sequence

    def remove(self, handle: int) -> Sequence | None:
        sequence = self._waiting.get(handle)
        if sequence is not None:
            self._leave(sequence)
        return sequence

    def oldest_arrival_s(self) -> float | None:
        return min((s.request.arrived_s for s in self._waiting.values()), default=None)

    def _leave(self, sequence: Sequence) -> None:
        del self._waiting[sequence.request.handle]
        if adapter := sequence.request.adapter:
            self.adapters[adapter] -= 1
            if not self.adapters[adapter]:
                del self.adapters[adapter]

    def _first(self, heap: list[_Entry]) -> Sequence | None:
        while heap and self._waiting.get(heap[0][1]) is not heap[0][2]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    # -- those that wait for their adapter

    @property
    def has_aside(self) -> bool:
        return bool(self._aside)

    def set_aside(self) -> None:
        """The one that would come up."""
        sequence = self.peek()
        assert sequence is not None
        heapq.heappush(self._aside.setdefault(sequence.request.adapter, []), heapq.heappop(self._heap))
        if sequence.notes is not None:
            sequence.notes.stand_aside("adapter")

    def recall(self, adapter: int) -> None:
        """Those set aside with this adapter come up again, each in its place."""
        for entry in self._aside.pop(adapter, ()):
            if self._waiting.get(entry[1]) is entry[2]:
                heapq.heappush(self._heap, entry)
                if entry[2].notes is not None:
                    entry[2].notes.stand_aside(None)

    def adapters_aside(self) -> list[int]:
        """Adapters that sequences were set aside with, in the order of the first sequence of each."""
        firsts = {adapter: self._first(heap) for adapter, heap in self._aside.items()}
        for adapter in [adapter for adapter, first in firsts.items() if first is None]:  # all were cancelled
            del self._aside[adapter]
        found = [(first.key, first.request.handle, adapter) for adapter, first in firsts.items() if first is not None]
        return [adapter for _, _, adapter in sorted(found)]

    def handles(self, adapter: int) -> list[int]:
        """Of all that wait with this adapter."""
        return [handle for handle, sequence in self._waiting.items() if sequence.request.adapter == adapter]

    def verify(self) -> None:
        """Recount; raises AssertionError on any disagreement."""
        entries = [*self._heap, *(entry for heap in self._aside.values() for entry in heap)]
        found = sorted(handle for _, handle, sequence in entries if self._waiting.get(handle) is sequence)
        assert found == sorted(self._waiting), "a waiting sequence is lost, or stands in the queue twice"
        adapters = Counter(s.request.adapter for s in self._waiting.values() if s.request.adapter)
        assert self.adapters == adapters, f"adapters of waiting sequences: {self.adapters}, counted {adapters}"
