"""`RequestLog`: the latest requests, in memory.

Does: keep the last 5,000, find one by its id, filter. Does not: outlive the process (the audit trail does).

Callers choose ids, and may choose one that is in use, by themselves or by others. So who looks for an id finds the
newest that it may see, and pages and links name a request by its number.

Anybody can have requests refused: those that were refused before it was known whose they are have a few places of
their own, so that they push out no others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import merge

import msgspec

from tonle.observe.seen_request import SeenRequest
from tonle.telemetry.time_spent import TimeSpent

MOST = 5000
MOST_UNKNOWN = 200  # further ones


class _Kept(msgspec.Struct, frozen=True):
    seen: SeenRequest  # without `spent`
    spent: bytes | None  # which takes half of a request's memory, and a tenth of that as bytes

    def whole(self) -> SeenRequest:
        if self.spent is None:
            return self.seen
        return msgspec.structs.replace(self.seen, spent=msgspec.msgpack.decode(self.spent, type=TimeSpent))


class _Ring:
    """The latest so many, the oldest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.requests: deque[_Kept] = deque()
        self._by_id: dict[str, list[_Kept]] = {}  # of one id: the oldest first

    def add(self, kept: _Kept) -> None:
        if len(self.requests) >= self._most:
            self._forget(self.requests.popleft())
        self.requests.append(kept)
        self._by_id.setdefault(kept.seen.id, []).append(kept)

    def _forget(self, oldest: _Kept) -> None:
        same = self._by_id[oldest.seen.id]
        if len(same) == 1:
            del self._by_id[oldest.seen.id]
        else:
            del same[0]

    def find(self, id: str, is_wanted: Callable[[SeenRequest], bool]) -> _Kept | None:
        """The newest."""
        return next((kept for kept in reversed(self._by_id.get(id, ())) if is_wanted(kept.seen)), None)


class RequestLog:
    """For the thread of the event loop."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._admitted, self._unknown = _Ring(most), _Ring(MOST_UNKNOWN)

    def __len__(self) -> int:
        return len(self._admitted.requests) + len(self._unknown.requests)

    def add(self, seen: SeenRequest) -> None:
        kept = _Kept(seen, None)
        if seen.spent is not None:
            kept = _Kept(msgspec.structs.replace(seen, spent=None), msgspec.msgpack.encode(seen.spent))
        (self._admitted if seen.is_admitted else self._unknown).add(kept)

    def find(self, id: str, is_wanted: Callable[[SeenRequest], bool] = lambda seen: True) -> SeenRequest | None:
        """The newest of that id for which `is_wanted` holds, whole."""
        found = [kept for ring in (self._admitted, self._unknown) if (kept := ring.find(id, is_wanted)) is not None]
        return max(found, key=_number).whole() if found else None

    def newest(
        self,
        limit: int = 100,
        *,
        before: int | None = None,
        text: str = "",
        status: str = "",
        model: str = "",
        key: str = "",
        backend: str = "",
    ) -> list[SeenRequest]:
        """Newest first, those that ended before the one with the number `before`. Empty filters let all pass; `status` is
        a word or an HTTP status, `key` an id or a name, `text` a part of any id or name. They come without `spent`: `find`
        has it."""
        found: list[SeenRequest] = []
        wanted = text.casefold()
        for seen in self._from(before):
            if len(found) >= limit:
                break
            if (
                (not status or status in (seen.status, str(seen.http_status)))
                and (not model or model in (seen.model, seen.adapter))
                and (not key or key in (seen.key_id, seen.key_name))
                and (not backend or backend == seen.backend)
                and (not wanted or _mentions(seen, wanted))
            ):
                found.append(seen)
        return found

    def _from(self, before: int | None) -> Iterator[SeenRequest]:
        newest_first = merge(
            reversed(self._admitted.requests), reversed(self._unknown.requests), key=_number, reverse=True
        )
        return (kept.seen for kept in newest_first if before is None or kept.seen.number < before)


def _number(kept: _Kept) -> int:
    return kept.seen.number


def _mentions(seen: SeenRequest, text: str) -> bool:
    texts = (seen.id, seen.model, seen.key_name, seen.key_id, seen.backend, seen.path, seen.status, seen.error,
             seen.experiment, seen.arm, seen.adapter, seen.trace_id)  # fmt: skip
    return any(text in part.casefold() for part in texts if part)
