"""`TenantQueue`: grammars that wait to be compiled, one of each tenant in turn, so that many of one do not hold up the others."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

Key = tuple[bytes, str]  # whose, and the grammar: what one tenant has compiled tells others nothing


class TenantQueue:
    """One thread puts, one gets."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[bytes, deque[Key]] = OrderedDict()  # whose turn is next comes first
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, key: Key) -> None:
        with self._changed:
            self._waiting.setdefault(key[0], deque()).append(key)
            self._changed.notify()

    def discard(self, key: Key) -> bool:
        """Whether it was still waiting."""
        with self._changed:
            keys = self._waiting.get(key[0])
            if keys is None or key not in keys:
                return False
            keys.remove(key)
            if not keys:
                del self._waiting[key[0]]
            return True

    def close(self) -> None:
        """`get` returns None from now on, whatever waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def get(self) -> Key | None:
        """Waits for the next one."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            tenant, keys = self._waiting.popitem(last=False)
            key = keys.popleft()
            if keys:
                self._waiting[tenant] = keys  # at the end
            return key
