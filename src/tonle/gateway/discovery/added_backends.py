"""`AddedBackends`: the source of backends that admins add, change and remove while the gateway runs.

Does: keep them in the state store, notice what other gateways with the same store changed. Does not: answer HTTP
(`gateway/backend_admin.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from tonle.config.gateway import backend_name
from tonle.config.routing import BackendConfig
from tonle.errors import StoreLost
from tonle.gateway.backends.backend import Backend
from tonle.gateway.discovery.backend_store import BackendStore
from tonle.gateway.discovery.fleet import Fleet
from tonle.gateway.discovery.source import SourceLost

FOLLOW_S = 2.0  # how soon a backend that was added at another gateway is known here


class AddedBackends:
    name = "admin"

    def __init__(self, fleet: Fleet, store: BackendStore, *, shared: bool) -> None:
        """`shared`: other gateways change the store, too."""
        self._fleet = fleet
        self._store = store
        self._shared = shared
        self._changing = asyncio.Lock()  # what was read before a change must not be reconciled after it

    @property
    def place(self) -> str:
        return self._store.place

    async def watch(self) -> AsyncIterator[Sequence[BackendConfig]]:
        while True:
            async with self._changing:
                try:
                    rows = await self._store.all_backends()
                except StoreLost as error:
                    raise SourceLost(str(error)) from error
                yield rows  # it is reconciled before the lock is free
            if not self._shared:
                await asyncio.Event().wait()
            await asyncio.sleep(FOLLOW_S)

    async def put(self, row: BackendConfig) -> Backend:
        """Add it, or change it. Raises `ConfigError`, `StoreLost`."""
        async with self._changing:
            self._fleet.check(self.name, row)
            await self._store.put_backend(row)
            return self._fleet.put(self.name, row)

    async def remove(self, backend: Backend) -> None:
        """Raises `StoreLost`."""
        async with self._changing:
            await self._store.delete_backend(backend_name(backend.row))
            self._fleet.remove(backend)
