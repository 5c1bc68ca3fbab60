"""`Chains`: which record gave out an id, so that the request that repeats it is recorded as its continuation.

Does: remember the ids of recent answers per owner, within bounds. Does not: find ids (`protocol/call_ids.py`), or outlive the
process: what is forgotten here is found again when records are read (`audit/index.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

MAX_IDS = 65_536  # of all owners; about 25 MB
MAX_IDS_OF_OWNER = 8_192  # one owner cannot push out all others
TTL_S = 24 * 3600.0


class Link(NamedTuple):
    """A place in a chain of requests."""

    record_id: str
    chain_id: str  # the id of its first record


class Chains:
    """The ids used last are kept. An owner never sees another's."""

    def __init__(
        self,
        *,
        max_ids: int = MAX_IDS,
        max_ids_of_owner: int = MAX_IDS_OF_OWNER,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_ids = max_ids
        self._max_of_owner = max_ids_of_owner
        self._ttl_s = ttl_s
        self._clock = clock
        # Least recently used first, owners and ids of each: id -> (when it expires, who gave it out)
        self._owners: OrderedDict[str, OrderedDict[str, tuple[float, Link]]] = OrderedDict()
        self.num_ids = 0

    def find(self, owner: str, ids: Iterable[str]) -> Link | None:
        """Who gave out the first of `ids` that is known."""
        known = self._owners.get(owner)
        if known is None:
            return None
        for each in ids:
            if each in known:
                expires_s, link = known[each]
                if expires_s > self._clock():
                    known.move_to_end(each)
                    self._owners.move_to_end(owner)
                    return link
                self._drop(owner, each)
        return None

    def note(self, owner: str, ids: Iterable[str], link: Link) -> None:
        """An answer gave out `ids`. Of several with the same id, the last counts."""
        expires_s = self._clock() + self._ttl_s
        for each in ids:
            known = self._owners.setdefault(owner, OrderedDict())
            self._owners.move_to_end(owner)
            self.num_ids += each not in known
            known[each] = (expires_s, link)
            known.move_to_end(each)
            if len(known) > self._max_of_owner:
                self._drop(owner, next(iter(known)))
            if self.num_ids > self._max_ids:
                oldest = next(iter(self._owners))
                self._drop(oldest, next(iter(self._owners[oldest])))

    def _drop(self, owner: str, each: str) -> None:
        known = self._owners[owner]
        del known[each]
        self.num_ids -= 1
        if not known:
            del self._owners[owner]


def session_chain(owner: str, session: str) -> str:
    """The chain of all requests that name this session: the same on every gateway, and after a restart."""
    return hashlib.blake2b(f"{owner}\0{session}".encode(errors="replace"), digest_size=16).hexdigest()
