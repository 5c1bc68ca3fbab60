"""The queue of waiting requests: priority, then arrival, with ageing."""

from __future__ import annotations

import heapq

from tonle.engine.request import Request
from tonle.engine.schedule.sequence import Sequence


def order_key(request: Request, ageing_s: float) -> float:
    """A request of a lower priority is queued as if it had arrived later, by `ageing_s` per level.

    The key never changes, so the queue stays sorted, and no request starves: a LOW request is overtaken only by those that
    arrive within 3 * ageing_s after it.
    """
    return request.arrived_s + request.priority * ageing_s


class WaitingQueue:
    """Sequences that hold nothing, best first. Cancelled ones are skipped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._waiting: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, sequence: Sequence) -> None:
        self._waiting[sequence.request.handle] = sequence
        heapq.heappush(self._heap, (sequence.key, sequence.request.handle, sequence))

    def peek(self) -> Sequence | None:
        while self._heap and self._waiting.get(self._heap[0][1]) is not self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        sequence = self.peek()
        assert sequence is not None
        heapq.heappop(self._heap)
        del self._waiting[sequence.request.handle]
        return sequence

    def take(self, handle: int) -> Sequence:
        """One of them, whatever its place. It may come back, so nothing of it stays."""
        sequence = self._waiting.pop(handle)
        self._heap = [entry for entry in self._heap if entry[2] is not sequence]
        heapq.heapify(self._heap)
        return sequence

    def remove(self, handle: int) -> Sequence | None:
        return self._waiting.pop(handle, None)

    def oldest_arrival_s(self) -> float | None:
        return min((s.request.arrived_s for s in self._waiting.values()), default=None)
