"""`RecentHandles`: which HTTP request the engine's latest handles belong to.

Does: remember the last few thousand, so that an explanation can name the request whose prompt another one waited behind. Does
not: know whether they still run.
"""

from __future__ import annotations

from collections.abc import Iterable

MOST = 16_384  # handles; a request has one for each of its answers


class RecentHandles:
    """For the thread of the event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._request_ids: dict[int, str] = {}  # oldest first

    def note(self, request_id: str, handles: Iterable[int]) -> None:
        ids = self._request_ids
        for handle in handles:
            ids[handle] = request_id
        while len(ids) > self._most:
            del ids[next(iter(ids))]

    def request_of(self, handle: int) -> str | None:
        return self._request_ids.get(handle)
