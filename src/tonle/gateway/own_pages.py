"""What the server answers without a model: the list of models, its state, metrics and version.

Does: reply from what is known here, or from what the engine in this process says of itself. Does not: check keys
(`routes.py` does).
"""

from __future__ import annotations

import time
from collections.abc import Collection

import msgspec

from tonle import __version__
from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.exchange import Exchange
from tonle.errors import UnknownModel
from tonle.gateway.api_keys.key import Key
from tonle.gateway.backends.transport import SHOW_PATHS_HEADER, TRUST_SALT_HEADER
from tonle.gateway.hops import GATEWAY_HEADER, VIA_HEADER, read_via
from tonle.gateway.services import Services
from tonle.protocol.replies import ModelEntry


class OwnPages:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._started_s = time.monotonic()

    # -- models

    async def models(self, exchange: Exchange) -> None:
        """Those the key may use."""
        if self._services.is_local:
            await self.page(exchange)
            return
        headers = [(GATEWAY_HEADER, self._services.pipeline.hops.name)]
        if exchange.key.is_gateway:
            headers.append((TRUST_SALT_HEADER, "1"))
        listed = self._listed(exchange.key, read_via(exchange.header(VIA_HEADER)))
        exchange.reply(msgspec.json.encode({"object": "list", "data": listed}), headers=headers)

    async def model(self, exchange: Exchange) -> None:
        if self._services.is_local:
            await self.page(exchange)
            return
        name = exchange.path.removeprefix("/v1/models/")
        for entry in self._listed(exchange.key):
            if entry["id"] == name:
                exchange.reply(msgspec.json.encode(entry))
                return
        raise UnknownModel(f"there is no model {name!r} for this key; GET /v1/models lists those there are")

    def _listed(self, key: Key, passed: Collection[str] = ()) -> list[dict[str, object]]:
        return [
            {
                "id": name,
                "object": "model",
                "created": entry.created,
                "owned_by": entry.owned_by or "tonle",
                "root": _root(entry, key),
                "parent": entry.parent,
                "max_model_len": entry.max_model_len,
                **({} if entry.adapter_digest is None else {"digest": entry.adapter_digest}),
                **({} if entry.kind is None else {"kind": entry.kind, "facts": entry.facts}),
            }
            for name, entry in self._services.router.public_models(passed).items()
            if key.may_use(name)
        ]

    # -- state

    def _why_not_ready(self) -> str | None:
        if not self._services.is_open():
            return "the gateway is shutting down"
        if not any(backend.available for backend in self._services.pool.backends):
            return "no healthy backend"
        return None

    async def live(self, exchange: Exchange) -> None:
        exchange.reply(b'{"status":"alive"}')

    async def ready(self, exchange: Exchange) -> None:
        reason = self._why_not_ready()
        if self._services.is_local and reason is None:
            await self.page(exchange)
            return
        body = {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}
        exchange.reply(msgspec.json.encode(body), status=200 if reason is None else 503)

    async def health(self, exchange: Exchange) -> None:
        services, reason = self._services, self._why_not_ready()
        body: dict[str, object] = {"status": "healthy" if reason is None else "unhealthy", "reason": reason}
        body |= services.metrics.sla.report()
        if services.is_local:
            inner = await self._ask_local(exchange)
            body |= {name: value for name, value in msgspec.json.decode(inner.body).items() if name not in body}
            if inner.status != 200:
                reason, body["status"] = "unhealthy", "unhealthy"
                body["reason"] = msgspec.json.decode(inner.body).get("reason")
        else:
            available = sum(backend.available for backend in services.pool.backends)
            body["backends"] = {"available": available, "all": len(services.pool.backends)}
        if services.shared is not None:
            body["shared_state"] = "ok" if services.shared.lost is None else "lost"
        if (cache := services.replay.cache) is not None:
            body["cache"] = {"entries": cache.num_entries, "hit_rate": round(cache.stats.hit_rate, 4)}
        body.setdefault("uptime_s", round(time.monotonic() - self._started_s, 3))  # of several front ends, the server's
        exchange.reply(msgspec.json.encode(body), status=200 if reason is None else 503)

    async def metrics(self, exchange: Exchange) -> None:
        """Of several front ends, what they count together: each one's own counters would jump from scrape to scrape."""
        local = self._services.local_metrics
        source = self._services.metrics if local is None or not local.shared else local
        text, content_type = source.render(exchange.header("accept"))
        exchange.reply(text, content_type=content_type)

    async def version(self, exchange: Exchange) -> None:
        exchange.reply(msgspec.json.encode({"version": __version__}))

    async def clear_cache(self, exchange: Exchange) -> None:
        cache = self._services.replay.cache
        dropped = await cache.clear() if cache is not None else 0
        exchange.reply(msgspec.json.encode({"status": "cleared", "entries": dropped}))

    # -- the application in this process

    async def _ask_local(self, exchange: Exchange) -> BufferedReply:
        services = self._services
        (backend,) = services.pool.backends
        answer = BufferedReply()
        headers = {name: value for name in ("accept", "host") if (value := exchange.header(name))}
        headers["x-request-id"] = exchange.request_id
        is_admin = exchange.key is not None and exchange.key.may("admin")
        if is_admin if services.auth.has_keys else services.enable_lora:
            headers[SHOW_PATHS_HEADER] = "1"
        await backend.send("GET", exchange.path, b"", headers, answer, first_s=backend.timeout_s)
        return answer

    async def page(self, exchange: Exchange) -> None:
        answer = await self._ask_local(exchange)
        content_type = answer.headers.get("content-type", "application/json")
        names = ("retry-after", "x-process-time", TRUST_SALT_HEADER)
        passed = [(name, value) for name, value in answer.headers.items() if name in names]
        exchange.reply(answer.body, status=answer.status, content_type=content_type, headers=passed)


def _root(entry: ModelEntry, key: Key) -> str:
    """Of an adapter, only those who may load one see where it came from."""
    hidden = entry.parent is not None and not key.may("admin")
    return (entry.parent if hidden else entry.root) or entry.id
