"""`HostMemory`: blocks in this machine's memory, the least recently used first out.

One buffer is divided into places of a block each. On a GPU's machine it is pinned, so that copies to the device need no second
copy. Pages are taken from the system as they are first used, unless they are pinned.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from tonle.engine.kv.tiers.tier import TierCounts
from tonle.models.inputs import release_pages


class HostMemory:
    name = "memory"

    def __init__(self, buffer: np.ndarray) -> None:
        """`buffer`: (places, block bytes) uint8."""
        self.counts = TierCounts()
        self._buffer = buffer
        self._lock = threading.Lock()
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(len(buffer) - 1, -1, -1))

    def has(self, key: bytes) -> bool:
        return key in self._place_of

    def load(self, key: bytes, out: memoryview) -> bool:
        with self._lock:
            place = self._place_of.get(key)
            if place is None:
                return False
            self._place_of.move_to_end(key)
            out[:] = self._buffer[place].data
        return True

    def save(self, key: bytes, data: memoryview) -> None:
        """A place must be free."""
        with self._lock:
            if key in self._place_of:
                self._place_of.move_to_end(key)
                return
            place = self._free.pop()
            self._buffer[place].data[:] = data
            self._place_of[key] = place
            self._count()

    def oldest(self) -> bytes | None:
        """The key that has to leave before another is saved; None: a place is free."""
        with self._lock:
            return None if self._free else next(iter(self._place_of))

    def drop(self, key: bytes) -> None:
        """If it is there still."""
        with self._lock:
            if (place := self._place_of.pop(key, None)) is None:
                return
            self._free.append(place)
            self.counts.evicted += 1
            self._count()

    def clear(self) -> None:
        with self._lock:
            self._free += self._place_of.values()
            self._place_of.clear()
            self._count()

    def release_memory(self) -> None:
        """After `clear`. Pinned memory stays as it is."""
        with self._lock:
            release_pages(self._buffer.ctypes.data, self._buffer.nbytes)

    def close(self) -> None:
        pass

    def _count(self) -> None:
        self.counts.num_blocks = len(self._place_of)
        self.counts.num_bytes = len(self._place_of) * self._buffer.shape[1]
