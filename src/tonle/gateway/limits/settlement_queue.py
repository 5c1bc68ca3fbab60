"""`SettlementQueue`: settled requests that have not been sent to the server yet.

Does: collect, send in batches in order, keep what could not be sent. Does not: decide when (`shared.py`).
"""

from __future__ import annotations

import asyncio

from tonle.gateway.limits.shared_counts import Held, Settlement, SharedCounts


class UsageBatch:
    """Settlements that travel together."""

    def __init__(self) -> None:
        self.leases: list[Settlement] = []
        self.usage: dict[str, int] = {}  # tokens by key, of requests that were never charged
        self.key_ids: set[str] = set()  # whose leases these are
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __bool__(self) -> bool:
        return bool(self.leases or self.usage)

    def take_back(self, earlier: UsageBatch) -> None:
        """`earlier` could not be sent: it goes with this one, and first."""
        self.leases[:0] = earlier.leases
        self.key_ids |= earlier.key_ids
        for key_id, used in earlier.usage.items():
            self.usage[key_id] = self.usage.get(key_id, 0) + used

    def settlements(self) -> list[Settlement]:
        return [*self.leases, *(Settlement(key_id, used) for key_id, used in self.usage.items())]


class SettlementQueue:
    """Built on the event loop it is used on."""

    def __init__(self) -> None:
        self._collecting = UsageBatch()
        self._sending: UsageBatch | None = None

    def add(self, held: Held, used: int) -> None:
        self._collecting.leases.append(Settlement(held.key_id, used, held))
        self._collecting.key_ids.add(held.key_id)

    def add_usage(self, key_id: str, used: int) -> None:
        """Of a request that holds no lease: only the sum per key is sent, and later."""
        if used:
            self._collecting.usage[key_id] = self._collecting.usage.get(key_id, 0) + used

    async def ended(self, key_id: str) -> None:
        """Until every lease of this key that was settled before now was sent to the server, or it could not be reached."""
        for batch in (self._collecting, self._sending):
            if batch is not None and key_id in batch.key_ids:
                await asyncio.shield(batch.ended)
                return

    async def send(self, counts: SharedCounts) -> bool:
        """False if there was nothing to send. Raises `StoreLost`, and keeps all. Only one call at a time."""
        if not self._collecting:
            return False
        batch = self._sending = self._collecting
        self._collecting = UsageBatch()
        try:
            await counts.settle(batch.settlements())
        except BaseException:
            self._collecting.take_back(batch)
            raise
        finally:
            self._sending = None
            batch.ended.set_result(None)
        return True
