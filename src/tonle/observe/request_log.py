"""`RequestLog`: the latest requests, in memory.

Does: keep the last 5,000, find one by its id, filter. Does not: outlive the process (the audit trail does).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from tonle.observe.seen_request import SeenRequest
from tonle.telemetry.time_spent import TimeSpent

MOST = 5000


class _Kept(msgspec.Struct, frozen=True):
    seen: SeenRequest  # without `spent`
    spent: bytes | None  # which takes half of a request's memory, and a tenth of that as bytes


class RequestLog:
    """For the thread of the event loop."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._requests: deque[_Kept] = deque()
        self._by_id: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, seen: SeenRequest) -> None:
        if len(self._requests) >= self.most:
            oldest = self._requests.popleft()
            if self._by_id.get(oldest.seen.id) is oldest:  # callers may choose ids, and choose one twice
                del self._by_id[oldest.seen.id]
        kept = _Kept(seen, None)
        if seen.spent is not None:
            kept = _Kept(msgspec.structs.replace(seen, spent=None), msgspec.msgpack.encode(seen.spent))
        self._requests.append(kept)
        self._by_id[seen.id] = kept

    def find(self, id: str) -> SeenRequest | None:
        """The newest of that id, whole."""
        kept = self._by_id.get(id)
        if kept is None or kept.spent is None:
            return None if kept is None else kept.seen
        return msgspec.structs.replace(kept.seen, spent=msgspec.msgpack.decode(kept.spent, type=TimeSpent))

    def newest(
        self,
        limit: int = 100,
        *,
        before: str | None = None,
        text: str = "",
        status: str = "",
        model: str = "",
        key: str = "",
        backend: str = "",
    ) -> list[SeenRequest]:
        """Newest first, those that ended before the request `before`. Empty filters let all pass; `status` is a word or an HTTP
        status, `key` an id or a name, `text` a part of any id or name. They come without `spent`: `find` has it."""
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

    def _from(self, before: str | None) -> Iterator[SeenRequest]:
        requests = reversed(self._requests)
        if before:
            last = self._by_id.get(before)
            if last is None:  # it is no longer kept, and neither are those before it
                return
            for kept in requests:
                if kept is last:
                    break
        for kept in requests:
            yield kept.seen


def _mentions(seen: SeenRequest, text: str) -> bool:
    texts = (seen.id, seen.model, seen.key_name, seen.key_id, seen.backend, seen.path, seen.status, seen.error,
             seen.experiment, seen.arm, seen.adapter, seen.trace_id)  # fmt: skip
    return any(text in part.casefold() for part in texts if part)
