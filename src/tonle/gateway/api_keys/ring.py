"""`KeyRing`: the keys that are valid now, in memory; follows the store as other processes change it.

Does: find a key by its secret in constant time, add, revoke. Does not: block the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Iterable

from tonle.gateway.api_keys.key import Key, digest_of
from tonle.gateway.api_keys.key_store import KeyStore

log = logging.getLogger("tonle.gateway")

FOLLOW_S = 1.0  # how long a key revoked by another process may still work


class KeyRing:
    """Keys from the settings (`fixed`) and, if there is one, from the store."""

    def __init__(self, fixed: Iterable[Key] = (), store: KeyStore | None = None) -> None:
        self.store = store
        self._fixed = list(fixed)
        self._by_digest: dict[str, Key] = {}
        self._had_keys = False
        self._version: int | None = None
        self._follower: asyncio.Task[None] | None = None
        self._adopt([])

    @property
    def empty(self) -> bool:
        """There never was a key. Once there was one, callers need a key, even if the last one was revoked or lost."""
        return not self._had_keys

    def find(self, secret: str) -> Key | None:
        # Looked up by digest: how long that takes tells nothing about secrets that exist.
        digest = digest_of(secret)
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def current(self, key: Key) -> Key | None:
        """As it is now; None once it was revoked, or left the settings."""
        return self._by_digest.get(key.digest)

    async def add(self, key: Key) -> None:
        assert self.store is not None, "keys cannot be added without a store"
        await self.store.add(key)
        await self.reload()

    async def revoke(self, key_id: str) -> Key:
        """Raises `NotFound`."""
        assert self.store is not None, "keys cannot be revoked without a store"
        key = await self.store.revoke(key_id)
        await self.reload()
        return key

    async def reload(self) -> None:
        if self.store is not None:
            self._adopt(await self.store.all())

    def _adopt(self, stored: list[Key]) -> None:
        known = [*self._fixed, *stored]
        self._had_keys = self._had_keys or bool(known)
        self._by_digest = {key.digest: key for key in known if key.revoked is None}

    # -- following the store

    def start(self) -> None:
        if self.store is not None:
            self._follower = asyncio.create_task(self._follow(self.store))

    def stop(self) -> None:
        if self._follower is not None:
            self._follower.cancel()

    async def _follow(self, store: KeyStore) -> None:
        lost = False
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                version = await store.version()
                if version != self._version:
                    await self.reload()
                    self._version = version
                if lost:
                    lost = False
                    log.warning("the keys in %s can be read again", store.place)
            except Exception as error:
                if not lost:
                    lost = True
                    log.error("cannot read the keys in %s; those known stay valid: %s", store.place, error)
