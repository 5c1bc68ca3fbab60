"""Which handler answers which path, and the frame around every one of them: CORS, errors, a log line.

Does: route, guard by scope, turn errors into replies. Does not: know the order of a request's stages (`pipeline.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from tonle import __version__
from tonle.config.gateway import GatewayConfig
from tonle.edge.exchange import Exchange
from tonle.errors import TonleError, UnknownModel
from tonle.gateway.admin import Admin
from tonle.gateway.api_keys.key import Key, Scope
from tonle.gateway.auth import Auth
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.backends.buffered_reply import BufferedReply
from tonle.gateway.cached_reply import CachedReplies
from tonle.gateway.call import Call
from tonle.gateway.gateway_metrics import GatewayMetrics
from tonle.gateway.inference_service import InferenceCall
from tonle.gateway.limits.shared_limiter import SharedLimiter
from tonle.gateway.pipeline import Pipeline
from tonle.gateway.proxies import Proxies
from tonle.gateway.routing.router import Router
from tonle.protocol.errors import ErrorReply, error_reply, no_such_path, wrong_method
from tonle.telemetry.logs import one_line

log = logging.getLogger("tonle.gateway")

# Everything a model answers goes through the pipeline, and is on record.
PIPED = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank",
    "/v1/score", "/tokenize", "/detokenize",
)  # fmt: skip
INFERENCE = "/api/v1/inference"

# What somebody is told who asks for a path that is not there.
PATHS_HINT = "GET /v1/models lists the models; docs/gateway.md lists the paths of a gateway."
DOCS_HINT = "GET /docs lists what there is."

Handle = Callable[[Exchange], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class Rooms:
    """What the handlers need."""

    config: GatewayConfig
    auth: Auth
    pipeline: Pipeline
    router: Router
    pool: BackendPool
    replay: CachedReplies
    watchers: GatewayMetrics
    admin: Admin
    proxies: Proxies
    is_open: Callable[[], bool]  # False while it is being stopped
    shared: SharedLimiter | None = None  # where limits are shared with other gateways
    inline: bool = False  # the only backend is an application in this process, with pages of its own


class Routes:
    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._started_s = time.monotonic()
        admin = rooms.admin
        self._exact: dict[str, dict[str, tuple[Scope | None, Handle]]] = {
            "/v1/models": {"GET": ("models", self.models)},
            "/health": {"GET": (None, self.health)},
            "/health/live": {"GET": (None, self.live)},
            "/health/ready": {"GET": (None, self.ready)},
            "/version": {"GET": (None, self.version)},
            "/metrics": {"GET": ("metrics", self.metrics)},
            "/cache/clear": {"POST": ("admin", self.clear_cache)},
            "/admin/keys": {"GET": ("admin", admin.list_keys), "POST": ("admin", admin.create_key)},
            "/admin/backends": {"GET": ("admin", admin.list_backends)},
        }
        if rooms.inline:
            self._exact |= {path: {"GET": (None, self._page)} for path in ("/docs", "/openapi.json")}

    @property
    def paths(self) -> list[str]:
        """Those with one fixed name."""
        return [*PIPED, INFERENCE, *self._exact]

    async def __call__(self, exchange: Exchange) -> None:
        try:
            self._rooms.proxies.place(exchange)
            self._allow_origin(exchange)
            await self._handle(exchange)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, TonleError):
                exchange.problem = f"{type(error).__name__}: {error}"
                log.exception("%s %s failed, id %s", exchange.method, _safe(exchange.path), exchange.request_id)
            _send_error(exchange, error_reply(error))
        finally:
            level = logging.DEBUG if exchange.status < 400 and exchange.problem is None else _severity(exchange)
            if log.isEnabledFor(level):
                log.log(level, "%s %s %d %.1f ms%s, id %s%s", exchange.method, _safe(exchange.path), exchange.status,
                        exchange.elapsed_s * 1000, _note(exchange), exchange.request_id, _reason(exchange))  # fmt: skip

    async def _handle(self, exchange: Exchange) -> None:
        path, method = exchange.path, exchange.method
        if method == "POST" and (path in PIPED or path == INFERENCE):
            await self._generate(exchange)
            return
        if method == "OPTIONS":
            exchange.reply(b"", status=204)
            return
        methods = self._methods(path)
        if not methods:
            _send_error(exchange, no_such_path(_safe(path), DOCS_HINT if self._rooms.inline else PATHS_HINT))
            return
        found = methods.get("GET" if method == "HEAD" else method)
        if found is None:
            _send_error(exchange, wrong_method(method, _safe(path), list(methods)))
            return
        scope, handler = found
        if scope is not None:
            self._rooms.auth.admit(exchange, scope)
        await handler(exchange)

    def _methods(self, path: str) -> dict[str, tuple[Scope | None, Handle]]:
        admin = self._rooms.admin
        if path in self._exact:
            return self._exact[path]
        if path.startswith("/v1/models/"):
            return {"GET": ("models", self.model)}
        if path.startswith("/admin/keys/"):
            return {"DELETE": ("admin", admin.revoke_key)}
        if path.startswith("/admin/backends/") and path.endswith("/drain"):
            return {"POST": ("admin", admin.drain)}
        if path.startswith("/admin/backends/") and path.endswith("/resume"):
            return {"POST": ("admin", admin.resume)}
        if path in PIPED or path == INFERENCE:
            return {"POST": ("models", self._generate)}
        return {}

    async def _generate(self, exchange: Exchange) -> None:
        if exchange.path != INFERENCE:
            await self._rooms.pipeline.run(Call(exchange, exchange.path))
            return
        config = self._rooms.config
        call = InferenceCall(
            exchange, context_window=config.context_window, max_context_length=config.max_context_length
        )
        await self._rooms.pipeline.run(call)

    # -- models

    async def models(self, exchange: Exchange) -> None:
        """Those the key may use."""
        if self._rooms.inline:
            await self._page(exchange)
            return
        key = self._rooms.auth.admit(exchange)
        exchange.reply(msgspec.json.encode({"object": "list", "data": self._listed(key)}))

    async def model(self, exchange: Exchange) -> None:
        if self._rooms.inline:
            await self._page(exchange)
            return
        key, name = self._rooms.auth.admit(exchange), exchange.path.removeprefix("/v1/models/")
        for entry in self._listed(key):
            if entry["id"] == name:
                exchange.reply(msgspec.json.encode(entry))
                return
        raise UnknownModel(f"there is no model {name!r} for this key; GET /v1/models lists those there are")

    def _listed(self, key: Key) -> list[dict[str, object]]:
        return [
            {
                "id": name,
                "object": "model",
                "created": entry.created,
                "owned_by": entry.owned_by or "tonle",
                "root": entry.root or entry.id,
                "parent": entry.parent,
                "max_model_len": entry.max_model_len,
            }
            for name, entry in self._rooms.router.public_models().items()
            if key.may_use(name)
        ]

    # -- state

    def _why_not_ready(self) -> str | None:
        if not self._rooms.is_open():
            return "the gateway is shutting down"
        if not any(backend.available for backend in self._rooms.pool.backends):
            return "no healthy backend"
        return None

    async def live(self, exchange: Exchange) -> None:
        exchange.reply(b'{"status":"alive"}')

    async def ready(self, exchange: Exchange) -> None:
        if self._rooms.inline and self._rooms.is_open():
            await self._page(exchange)
            return
        reason = self._why_not_ready()
        body = {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}
        exchange.reply(msgspec.json.encode(body), status=200 if reason is None else 503)

    async def health(self, exchange: Exchange) -> None:
        rooms, reason = self._rooms, self._why_not_ready()
        body: dict[str, object] = {"status": "healthy" if reason is None else "unhealthy", "reason": reason}
        body |= rooms.watchers.sla.report()
        if rooms.inline:
            inner = await self._ask_inline(exchange)
            body |= {name: value for name, value in msgspec.json.decode(inner.body).items() if name not in body}
            if inner.status != 200:
                reason, body["status"] = "unhealthy", "unhealthy"
                body["reason"] = msgspec.json.decode(inner.body).get("reason")
        else:
            available = sum(backend.available for backend in rooms.pool.backends)
            body["backends"] = {"available": available, "all": len(rooms.pool.backends)}
        if rooms.shared is not None:
            body["shared_state"] = "ok" if rooms.shared.lost is None else "lost"
        if (cache := rooms.replay.cache) is not None:
            body["cache"] = {"entries": cache.num_entries, "hit_rate": round(cache.stats.hit_rate, 4)}
        body["uptime_s"] = round(time.monotonic() - self._started_s, 3)
        exchange.reply(msgspec.json.encode(body), status=200 if reason is None else 503)

    async def metrics(self, exchange: Exchange) -> None:
        text, content_type = self._rooms.watchers.render(exchange.header("accept"))
        if self._rooms.inline:
            text = (await self._ask_inline(exchange)).body + text
        exchange.reply(text, content_type=content_type)

    async def version(self, exchange: Exchange) -> None:
        exchange.reply(msgspec.json.encode({"version": __version__}))

    async def clear_cache(self, exchange: Exchange) -> None:
        cache = self._rooms.replay.cache
        dropped = await cache.forget_all() if cache is not None else 0
        exchange.reply(msgspec.json.encode({"status": "cleared", "entries": dropped}))

    # -- the application in this process

    async def _ask_inline(self, exchange: Exchange) -> BufferedReply:
        (backend,) = self._rooms.pool.backends
        answer = BufferedReply()
        headers = {name: value for name in ("accept", "host") if (value := exchange.header(name))}
        headers["x-request-id"] = exchange.request_id
        await backend.send("GET", exchange.path, b"", headers, answer, first_s=backend.timeout_s)
        return answer

    async def _page(self, exchange: Exchange) -> None:
        answer = await self._ask_inline(exchange)
        content_type = answer.headers.get("content-type", "application/json")
        passed = [(name, value) for name, value in answer.headers.items() if name in ("retry-after", "x-process-time")]
        exchange.reply(answer.body, status=answer.status, content_type=content_type, headers=passed)

    # -- web pages that call

    def _allow_origin(self, exchange: Exchange) -> None:
        origin, allowed = exchange.header("origin"), self._rooms.config.cors_origins
        if not origin or (origin not in allowed and "*" not in allowed):
            return
        exchange.extra_headers += [("access-control-allow-origin", origin), ("vary", "Origin")]
        if exchange.method == "OPTIONS":
            exchange.extra_headers += [
                ("access-control-allow-methods", "GET, POST, DELETE, OPTIONS"),
                ("access-control-allow-headers", exchange.header("access-control-request-headers") or "*"),
                ("access-control-max-age", "600"),
            ]


def _severity(exchange: Exchange) -> int:
    """A caller's mistake is news, a failure of this side is a warning. A 503 of /health, asked every second, is not."""
    is_ours = exchange.problem is not None and not 400 <= exchange.status < 500
    return logging.WARNING if is_ours else logging.INFO


def _note(exchange: Exchange) -> str:
    if exchange.problem is not None and exchange.status < 400:
        return ", broken off"
    return f", {exchange.gone}" if exchange.gone and exchange.problem is None else ""


def _reason(exchange: Exchange) -> str:
    """Last in the line and on one line: it may have a caller's words in it, or a backend's."""
    return "" if exchange.problem is None else f": {one_line(exchange.problem)}"


def _send_error(exchange: Exchange, error: ErrorReply) -> None:
    exchange.problem = exchange.problem or error.body.error.message
    if not exchange.status:
        exchange.reply(msgspec.json.encode(error.body), status=error.status, headers=error.headers)


def _safe(path: str) -> str:
    """To be logged and sent back: no control characters."""
    return path.encode("unicode_escape").decode()[:200]
