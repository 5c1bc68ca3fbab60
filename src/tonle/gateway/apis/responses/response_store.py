"""Where responses are kept: for `previous_response_id`, for item references, and to be read again.

Does: hold them in this process's memory, within a number of entries and of bytes, for a time after their last use. Each
belongs to its owner, the tenant of the key it was made with; no other can read it. Does not: know what is in them
(`redis_responses.py` keeps them in Redis instead).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tonle.errors import TooLarge

MAX_SIZE = 10_000  # responses
MAX_BYTES = 64 * 1024**2
OVERHEAD_BYTES = 500  # about what an entry takes beside its texts


class Items(NamedTuple):
    """What a response adds to a conversation. Both are JSON lists."""

    input: bytes
    output: bytes


class StoredResponse(msgspec.Struct, frozen=True):
    response: bytes  # JSON object, without its output
    input: bytes  # JSON list of items: those of this request only
    output: bytes  # JSON list of items
    chain: tuple[str, ...]  # ids of the responses that it continues, oldest first
    context_bytes: int  # input and output, of it and of those

    @property
    def num_bytes(self) -> int:
        ids = sum(len(response_id) for response_id in self.chain)
        return len(self.response) + len(self.input) + len(self.output) + ids + OVERHEAD_BYTES


class ResponseStore(Protocol):
    """Used on one event loop. Methods raise `StoreLost` if a server that keeps responses cannot be reached."""

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """A use: its time begins again."""

    async def get_items(self, owner: str, response_ids: Sequence[str]) -> list[Items | None]:
        """The same for the items of several."""

    async def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Raises `TooLarge`."""

    async def delete(self, owner: str, response_id: str) -> bool:
        """False: there was none."""

    async def close(self) -> None: ...


class _Entry(NamedTuple):
    expires_s: float
    stored: StoredResponse


class _Share:
    """What one owner has in the store."""

    __slots__ = ("ids", "num_bytes")

    def __init__(self) -> None:
        self.ids: OrderedDict[str, None] = OrderedDict()  # last used last
        self.num_bytes = 0


class MemoryResponses:
    """Implements `ResponseStore`. When it is full, the response that was used longest ago goes; if the owner of a new one holds
    more than half of the store, one of its own goes, so that one tenant cannot push out all others."""

    def __init__(
        self,
        ttl_s: float,
        *,
        max_size: int = MAX_SIZE,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_size = max_size
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()  # last used last, so it expires last
        self._shares: dict[str, _Share] = {}

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        return self._use(owner, response_id)

    async def get_items(self, owner: str, response_ids: Sequence[str]) -> list[Items | None]:
        found = [self._use(owner, response_id) for response_id in response_ids]
        return [None if stored is None else Items(stored.input, stored.output) for stored in found]

    async def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        if stored.num_bytes * 10 > self.max_bytes:  # it would push out too many others
            raise TooLarge(
                f"it has {stored.num_bytes} bytes, more than a tenth of response_store_max ({self.max_bytes})"
            )
        self._drop(owner, response_id)
        self._drop_expired()
        share = self._shares.setdefault(owner, _Share())
        self._entries[owner, response_id] = _Entry(self._clock() + self._ttl_s, stored)
        share.ids[response_id] = None
        share.num_bytes += stored.num_bytes
        self.num_bytes += stored.num_bytes
        while len(self._entries) > self.max_size or self.num_bytes > self.max_bytes:
            is_large = 2 * len(share.ids) > self.max_size or 2 * share.num_bytes > self.max_bytes
            self._drop(*((owner, next(iter(share.ids))) if is_large else next(iter(self._entries))))

    async def delete(self, owner: str, response_id: str) -> bool:
        self._drop_expired()
        return self._drop(owner, response_id)

    async def close(self) -> None:
        """Nothing to do."""

    def _use(self, owner: str, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        entry = self._entries.get((owner, response_id))
        if entry is None:
            return None
        self._entries[owner, response_id] = entry._replace(expires_s=self._clock() + self._ttl_s)
        self._entries.move_to_end((owner, response_id))
        self._shares[owner].ids.move_to_end(response_id)
        return entry.stored

    def _drop_expired(self) -> None:
        now_s = self._clock()
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.expires_s > now_s:
                return
            self._drop(*key)

    def _drop(self, owner: str, response_id: str) -> bool:
        entry = self._entries.pop((owner, response_id), None)
        if entry is None:
            return False
        share = self._shares[owner]
        del share.ids[response_id]
        share.num_bytes -= entry.stored.num_bytes
        self.num_bytes -= entry.stored.num_bytes
        if not share.ids:
            del self._shares[owner]
        return True
