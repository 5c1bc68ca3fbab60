"""`KeyRing`: the keys that are valid now, in memory; follows the store as other processes change it.

Does: find a key by its secret in constant time, add, revoke, tell what was used. Does not: block the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Iterable

from tonle.gateway.keys.key import Key, digest_of
from tonle.gateway.keys.store import KeyStore

log = logging.getLogger("tonle.gateway")

FOLLOW_S = 1.0  # how long a key revoked by another process may still work


class KeyRing:
    """Keys from the settings (`fixed`) and, if there is one, from the store."""

    def __init__(self, fixed: Iterable[Key] = (), store: KeyStore | None = None) -> None:
        self.store = store
        self._fixed = list(fixed)
        self._by_digest: dict[str, Key] = {}
        self._version = 0
        self._follower: asyncio.Task[None] | None = None
        self._adopt(store.all() if store is not None else [])

    @property
    def empty(self) -> bool:
        return not self._by_digest

    def find(self, secret: str) -> Key | None:
        # Looked up by digest: how long that takes tells nothing about secrets that exist.
        digest = digest_of(secret)
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    async def add(self, key: Key) -> None:
        assert self.store is not None, "keys cannot be added without a store"
        await asyncio.to_thread(self.store.add, key)
        await self.reload()

    async def revoke(self, key_id: str) -> Key:
        """Raises `NotFound`."""
        assert self.store is not None, "keys cannot be revoked without a store"
        key = await asyncio.to_thread(self.store.revoke, key_id)
        await self.reload()
        return key

    async def reload(self) -> None:
        if self.store is not None:
            self._adopt(await asyncio.to_thread(self.store.all))

    def _adopt(self, stored: list[Key]) -> None:
        valid = [key for key in [*self._fixed, *stored] if key.revoked is None]
        self._by_digest = {key.digest: key for key in valid}

    # -- following the store

    def start(self) -> None:
        if self.store is not None:
            self._follower = asyncio.create_task(self._follow(self.store))

    async def stop(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
        if self.store is not None:
            await asyncio.to_thread(self.store.close)

    async def _follow(self, store: KeyStore) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                version = await asyncio.to_thread(store.version)
                if version != self._version:
                    self._version = version
                    await self.reload()
            except Exception:
                log.exception("cannot read the keys in %s; those known stay valid", store.path)
