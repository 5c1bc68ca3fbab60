"""`KeyStore`: where keys are kept, as the gateway and `tonle keys` see it. The same in SQLite, PostgreSQL and Redis."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

from tonle.errors import NotFound
from tonle.gateway.api_keys.key import Key


class KeyStore(Protocol):
    """Several processes may use one; none of these calls blocks the event loop.

    Those on a server raise `StoreLost` while it cannot be reached.
    """

    place: str  # for messages: without passwords

    async def add(self, key: Key) -> None: ...

    async def all(self) -> list[Key]:
        """Oldest first, revoked ones too."""

    async def revoke(self, key_id: str) -> Key:
        """Raises `NotFound`. A key that is revoked already stays as it is."""

    async def version(self) -> int:
        """Changes when another process has added or revoked a key."""

    async def secret(self, name: str) -> str:
        """Drawn when it is first asked for; then always the same, for every process."""


def in_order(documents: list[bytes]) -> list[Key]:
    """Keys as they are stored; oldest first."""
    keys = (msgspec.json.decode(document, type=Key) for document in documents)
    return sorted(keys, key=lambda key: (key.created, key.id))


def revoked(document: bytes | None, key_id: str) -> Key:
    """The key as it is when revoked now. Raises `NotFound`."""
    if document is None:
        raise NotFound(f"there is no key {key_id!r}; `tonle keys list` shows all keys")
    key = msgspec.json.decode(document, type=Key)
    return key if key.revoked is not None else msgspec.structs.replace(key, revoked=int(time.time()))
