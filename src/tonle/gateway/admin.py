"""Managing the keys of a running gateway over HTTP. Every endpoint here needs a key with scope admin; to list, dashboard.

Does: list, create, revoke. Does not: check the key (`routes.py`), or manage backends (`backend_admin.py`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest
from tonle.gateway.api_keys.key import Key, KeyLimits, Scope, draw
from tonle.gateway.api_keys.key_store import KeyStore
from tonle.gateway.api_keys.ring import KeyRing
from tonle.gateway.limits.limiter import Limiter
from tonle.protocol.parse import parse


class KeyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /admin/keys. Limits stand beside the name or inside `limits`."""

    name: Annotated[str, Meta(min_length=1)]
    scopes: tuple[Scope, ...] = ("models",)
    models: tuple[str, ...] = ()
    limits: KeyLimits = KeyLimits()
    tenant: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None
    audio_seconds_per_minute: int | None = None
    images_per_minute: int | None = None

    def all_limits(self) -> KeyLimits:
        """Raises `InvalidRequest` if one is below 1, or given in both places."""
        found: dict[str, int | None] = {}
        for name in KeyLimits.__struct_fields__:
            outside, inside = getattr(self, name), getattr(self.limits, name)
            if outside is not None and inside is not None:
                raise InvalidRequest(f"{name} is given twice, also in limits; give it once", param=name)
            limit = found[name] = inside if outside is None else outside
            if limit is not None and limit < 1:
                raise InvalidRequest(f"{name} must be at least 1; leave it out for no limit of its own", param=name)
        return KeyLimits(**found)


class Admin:
    def __init__(self, ring: KeyRing, limiter: Limiter) -> None:
        self._ring = ring
        self._limiter = limiter

    async def list_keys(self, exchange: Exchange) -> None:
        keys = await self._need_store().all()
        used = await self._limiter.used_today([key.id for key in keys])
        _send(exchange, {"keys": [shown_key(key, used) for key in keys]})

    async def create_key(self, exchange: Exchange) -> None:
        self._need_store()
        wanted, _ = parse(exchange.body, KeyRequest)
        key, secret = draw(
            wanted.name, scopes=wanted.scopes, models=wanted.models, limits=wanted.all_limits(), tenant=wanted.tenant
        )
        await self._ring.add(key)
        _send(exchange, {"key": secret, **shown_key(key, {})}, status=201)

    async def revoke_key(self, exchange: Exchange) -> None:
        self._need_store()
        key = await self._ring.revoke(exchange.path.rpartition("/")[2])
        _send(exchange, shown_key(key, await self._limiter.used_today([key.id])))

    def _need_store(self) -> KeyStore:
        if self._ring.store is None:
            raise InvalidRequest("this server's keys are in its settings; there is no key store to change")
        return self._ring.store


def shown_key(key: Key, used: dict[str, int]) -> dict[str, Any]:
    """Without the digest."""
    shown: dict[str, Any] = msgspec.to_builtins(key)
    del shown["digest"]
    return shown | {"tokens_today": used.get(key.id, 0)}


def _send(exchange: Exchange, body: Any, *, status: int = 200) -> None:
    exchange.reply(msgspec.json.encode(body), status=status)
