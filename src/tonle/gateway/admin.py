"""Managing a running gateway over HTTP: keys, backends, cache. Every endpoint here wants a key with scope admin.

Does: list, create, revoke, drain, clear. Does not: check the key (`routes.py`) or change settings.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.pool import Pool
from tonle.gateway.keys.key import Key, Limits, Scope, draw
from tonle.gateway.keys.ring import KeyRing
from tonle.gateway.keys.store import KeyStore
from tonle.gateway.limits.charging import Charging
from tonle.protocol.parse import parse


class KeyWish(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    scopes: tuple[Scope, ...] = ("models",)
    models: tuple[str, ...] = ()
    limits: Limits = Limits()
    tenant: str = ""


class Admin:
    def __init__(self, ring: KeyRing, ledger: Charging, pool: Pool) -> None:
        self._ring = ring
        self._ledger = ledger
        self._pool = pool

    async def list_keys(self, exchange: Exchange) -> None:
        keys = await self._need_store().all()
        used = await self._ledger.used_today([key.id for key in keys])
        _send(exchange, {"keys": [shown_key(key, used) for key in keys]})

    async def create_key(self, exchange: Exchange) -> None:
        self._need_store()
        wish, _ = parse(exchange.body, KeyWish)
        key, secret = draw(wish.name, scopes=wish.scopes, models=wish.models, limits=wish.limits, tenant=wish.tenant)
        await self._ring.add(key)
        _send(exchange, {"key": secret, **shown_key(key, {})}, status=201)

    async def revoke_key(self, exchange: Exchange) -> None:
        self._need_store()
        key = await self._ring.revoke(exchange.path.rpartition("/")[2])
        _send(exchange, shown_key(key, await self._ledger.used_today([key.id])))

    async def list_backends(self, exchange: Exchange) -> None:
        _send(exchange, {"backends": [shown_backend(backend) for backend in self._pool.backends]})

    async def drain(self, exchange: Exchange) -> None:
        """POST /admin/backends/NAME/drain: finish what runs there, send nothing new."""
        await self._set_draining(exchange, draining=True)

    async def resume(self, exchange: Exchange) -> None:
        await self._set_draining(exchange, draining=False)

    async def _set_draining(self, exchange: Exchange, *, draining: bool) -> None:
        backend = self._pool.named(exchange.path.removeprefix("/admin/backends/").rpartition("/")[0])
        backend.draining = draining
        _send(exchange, shown_backend(backend))

    def _need_store(self) -> KeyStore:
        if self._ring.store is None:
            raise InvalidRequest("keys of this server stand in its settings; there is no store to change")
        return self._ring.store


def shown_key(key: Key, used: dict[str, int]) -> dict[str, Any]:
    """Without the digest."""
    shown: dict[str, Any] = msgspec.to_builtins(key)
    del shown["digest"]
    return shown | {"tokens_today": used.get(key.id, 0)}


def shown_backend(backend: Backend) -> dict[str, Any]:
    return {
        "name": backend.name,
        "url": backend.row.url,
        "kind": backend.kind,
        "role": backend.row.role,
        "length": backend.row.length,
        "models": list(backend.models),
        "available": backend.available,
        "unwell": backend.unwell,
        "warning": backend.warning,
        "draining": backend.draining,
        "breaker": backend.breaker.state,
        "running": backend.gate.num_inside,
        "waiting": backend.gate.num_queued,
        "service_s": round(backend.gate.service_s, 4),
        "sent": backend.num_sent,
        "failed": backend.num_failed,
    }


def _send(exchange: Exchange, body: Any, *, status: int = 200) -> None:
    exchange.reply(msgspec.json.encode(body), status=status)
