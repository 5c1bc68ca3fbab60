"""Keys in PostgreSQL, for several gateways. The tables are made by `gateway/postgres.py`."""

from __future__ import annotations

import secrets

import msgspec

from tonle.gateway.api_keys.key import Key
from tonle.gateway.api_keys.key_store import in_order, revoked
from tonle.gateway.postgres import Postgres


class PostgresKeys:
    """Owns `tonle_keys`, `tonle_keys_version` and `tonle_secrets`."""

    def __init__(self, server: Postgres) -> None:
        self.place = server.place
        self._server = server

    async def add(self, key: Key) -> None:
        async with self._server.writing() as connection:
            await connection.execute("INSERT INTO tonle_keys VALUES ($1, $2)", key.id, msgspec.json.encode(key))
            await connection.execute("UPDATE tonle_keys_version SET number = number + 1")

    async def all(self) -> list[Key]:
        rows = await self._server.fetch("SELECT document FROM tonle_keys")
        return in_order([row[0] for row in rows])

    async def revoke(self, key_id: str) -> Key:
        async with self._server.writing() as connection:
            document = await connection.fetchval("SELECT document FROM tonle_keys WHERE id = $1 FOR UPDATE", key_id)
            key = revoked(document, key_id)
            await connection.execute("UPDATE tonle_keys SET document = $2 WHERE id = $1",
                                     key_id, msgspec.json.encode(key))  # fmt: skip
            await connection.execute("UPDATE tonle_keys_version SET number = number + 1")
        return key

    async def version(self) -> int:
        ((number,),) = await self._server.fetch("SELECT number FROM tonle_keys_version")
        return int(number)

    async def secret(self, name: str) -> str:
        async with self._server.writing() as connection:
            await connection.execute("INSERT INTO tonle_secrets VALUES ($1, $2) ON CONFLICT DO NOTHING",
                                     name, secrets.token_hex(32))  # fmt: skip
            return str(await connection.fetchval("SELECT value FROM tonle_secrets WHERE name = $1", name))
