"""Which handler answers which path, the check of every head, and the frame around every handler: errors, one log line,
one count.

Does: route, guard by scope, turn errors into replies. Does not: know the order of a request's stages (`pipeline.py`) or
what web pages may do (`web_pages.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tonle import __version__
from tonle.config.gateway import GatewayConfig
from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.exchange import Exchange
from tonle.errors import TonleError, UnknownModel
from tonle.gateway.adapters import NO_KEYS_TO_LOAD, AdapterAdmin
from tonle.gateway.admin import Admin
from tonle.gateway.api_keys.key import Key, Scope
from tonle.gateway.auth import Auth
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.backends.transport import SHOW_PATHS_HEADER, TRUST_SALT_HEADER
from tonle.gateway.cached_reply import CachedReplies
from tonle.gateway.call import Call
from tonle.gateway.gateway_metrics import GatewayMetrics
from tonle.gateway.inference_service import InferenceCall
from tonle.gateway.limits.shared_limiter import SharedLimiter
from tonle.gateway.pipeline import Pipeline
from tonle.gateway.proxies import Proxies
from tonle.gateway.refusals import Forbidden, NoHandler
from tonle.gateway.routing.router import Router
from tonle.gateway.web_pages import WebPages, check_json
from tonle.protocol.adapters import LOAD_PATH, UNLOAD_PATH
from tonle.protocol.embeddings import RERANK_PATHS, SCORE_PATHS
from tonle.protocol.errors import ErrorReply, error_reply, no_such_path, not_supported_yet, wrong_method
from tonle.protocol.replies import ModelEntry
from tonle.protocol.unsupported_paths import unsupported_feature
from tonle.telemetry.logs import one_line
from tonle.telemetry.metrics import Metrics

log = logging.getLogger("tonle.http")

# Everything a model answers goes through the pipeline, and is on record.
PIPED = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages",
    *RERANK_PATHS, *SCORE_PATHS, "/tokenize", "/detokenize",
)  # fmt: skip
INFERENCE = "/api/v1/inference"
PATHS_HINT = "GET /v1/models lists the models; docs/gateway.md lists the paths of a gateway."
DOCS_HINT = "GET /docs lists what there is."

NO_KEYS = "this server has no keys, so it cannot be managed: start it with --admin-key KEY"

STATUS_CALLER_GONE = 499  # for the log and the metrics only: the caller hung up before the reply began

Handle = Callable[[Exchange], Awaitable[None]]


class Entry(NamedTuple):
    """One path and method."""

    scope: Scope | None  # of the key it needs
    handle: Handle
    takes_json: bool = False  # it has a body
    is_piped: bool = False  # the pipeline answers it, refusals included: each has a record
    is_probe: bool = False  # asked again and again by machines: not worth a line in the log
    unless_keys: str | None = NO_KEYS  # with scope admin, why a server without keys refuses it; None: it does not


class Found(NamedTuple):
    """What a path leads to. `pattern` names it in metrics, so that the number of series stays bounded."""

    pattern: str
    methods: dict[str, Entry]


NOTHING = Found("other", {})


@dataclass(slots=True, kw_only=True)
class Services:
    """What the handlers need."""

    config: GatewayConfig
    auth: Auth
    pipeline: Pipeline
    router: Router
    pool: BackendPool
    replay: CachedReplies
    metrics: GatewayMetrics
    admin: Admin
    adapters: AdapterAdmin
    proxies: Proxies
    is_open: Callable[[], bool]  # False while it is being stopped
    shared: SharedLimiter | None = None  # where limits are shared with other gateways
    local_metrics: Metrics | None = None  # of the engine in this process, where there is one in place of backends
    enable_lora: bool = False  # with such an engine and without keys, every caller may load and remove adapters

    @property
    def is_local(self) -> bool:
        return self.local_metrics is not None


class Routes:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._pages = WebPages(services.config)
        self._started_s = time.monotonic()
        # A server of one model tells of each request; a gateway in front of many tells of those that fail.
        self._access_level = logging.INFO if services.is_local else logging.DEBUG
        metrics = services.local_metrics
        self._count = services.metrics.count_http if metrics is None else metrics.count_http
        admin = services.admin
        loading = None if services.enable_lora else NO_KEYS_TO_LOAD
        table: dict[str, dict[str, Entry]] = {
            "/v1/models": {"GET": Entry("models", self.models)},
            "/health": {"GET": Entry(None, self.health, is_probe=True)},
            "/health/live": {"GET": Entry(None, self.live, is_probe=True)},
            "/health/ready": {"GET": Entry(None, self.ready, is_probe=True)},
            "/version": {"GET": Entry(None, self.version, is_probe=True)},
            "/metrics": {"GET": Entry("metrics", self.metrics, is_probe=True)},
            "/cache/clear": {"POST": Entry("admin", self.clear_cache, unless_keys=None)},
            LOAD_PATH: {"POST": Entry("admin", services.adapters.load, takes_json=True, unless_keys=loading)},
            UNLOAD_PATH: {"POST": Entry("admin", services.adapters.unload, takes_json=True, unless_keys=loading)},
            "/admin/keys": {
                "GET": Entry("admin", admin.list_keys),
                "POST": Entry("admin", admin.create_key, takes_json=True),
            },
            "/admin/backends": {"GET": Entry("admin", admin.list_backends)},
        }
        piped = Entry("models", self._generate, takes_json=True, is_piped=True)
        table |= {path: {"POST": piped} for path in (*PIPED, INFERENCE)}
        if services.is_local:
            table |= {path: {"GET": Entry(None, self._page, is_probe=True)} for path in ("/docs", "/openapi.json")}
        self._exact = {path: Found(path, methods) for path, methods in table.items()}
        self._model = Found("/v1/models/{id}", {"GET": Entry("models", self.model)})
        self._key = Found("/admin/keys/{id}", {"DELETE": Entry("admin", admin.revoke_key)})
        self._drain = Found("/admin/backends/{name}/drain", {"POST": Entry("admin", admin.drain)})
        self._resume = Found("/admin/backends/{name}/resume", {"POST": Entry("admin", admin.resume)})

    @property
    def paths(self) -> list[str]:
        """Those with one fixed name."""
        return list(self._exact)

    @property
    def patterns(self) -> list[str]:
        named = (self._model, self._key, self._drain, self._resume)
        return [*self._exact, *(found.pattern for found in named)]

    def check_head(self, exchange: Exchange) -> None:
        """Called before any of the body is kept. Raises what the request is refused with; finds the caller's key."""
        services, method = self._services, exchange.method
        services.proxies.place(exchange)
        if "origin" in exchange.headers:
            self._pages.answer_origin(exchange)
        found = self._find(exchange.path)
        entry = found.methods.get("GET" if method == "HEAD" else method)
        exchange.wants_body = entry is not None and entry.takes_json
        if method == "OPTIONS":
            return
        if entry is None:
            raise NoHandler(self._missing(exchange, found))
        if self._pages.checks_hosts or not services.auth.has_keys:
            self._pages.check(exchange, has_keys=services.auth.has_keys)
        if entry.scope is not None:
            self._admit(exchange, entry)
        if entry.takes_json:
            check_json(exchange)

    async def __call__(self, exchange: Exchange) -> None:
        found = self._find(exchange.path)
        try:
            await self._handle(exchange, found)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, TonleError):
                exchange.problem = f"{type(error).__name__}: {error}"
                log.exception("%s %s failed, id %s", exchange.method, _safe(exchange.path), exchange.request_id)
            _send_error(exchange, error.reply if isinstance(error, NoHandler) else error_reply(error))
        finally:
            self._account(exchange, found)
            exchange.refusal = None  # its traceback leads back here: a cycle

    def _find(self, path: str) -> Found:
        if (found := self._exact.get(path)) is not None:
            return found
        if path.startswith("/v1/models/"):
            return self._model
        if path.startswith("/admin/keys/"):
            return self._key
        if path.startswith("/admin/backends/") and path.endswith("/drain"):
            return self._drain
        if path.startswith("/admin/backends/") and path.endswith("/resume"):
            return self._resume
        return NOTHING

    async def _handle(self, exchange: Exchange, found: Found) -> None:
        method = exchange.method
        entry = found.methods.get("GET" if method == "HEAD" else method)
        if exchange.refusal is not None and (entry is None or not entry.is_piped):
            raise exchange.refusal
        if entry is None:
            exchange.reply(b"", status=204)  # to OPTIONS; any other was refused
        else:
            await entry.handle(exchange)

    def _missing(self, exchange: Exchange, found: Found) -> ErrorReply:
        path = _safe(exchange.path)
        if found.methods:
            return wrong_method(exchange.method, path, list(found.methods))
        hint = DOCS_HINT if self._services.is_local else PATHS_HINT
        feature = unsupported_feature(exchange.path)
        return no_such_path(path, hint) if feature is None else not_supported_yet(feature, hint)

    def _admit(self, exchange: Exchange, entry: Entry) -> None:
        auth, scope = self._services.auth, entry.scope
        assert scope is not None
        if scope == "admin" and self._services.is_local and not auth.has_keys:
            if entry.unless_keys is None:
                return
            raise Forbidden(entry.unless_keys)
        auth.admit(exchange, scope)

    def _account(self, exchange: Exchange, found: Found) -> None:
        """One count, one line. A caller's mistake is news, a failure of this side is a warning."""
        status = exchange.status or STATUS_CALLER_GONE
        self._count(exchange.method, found.pattern, status)
        problem = exchange.problem
        is_ours = problem is not None and not 400 <= status < 500
        entry = found.methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if is_ours:
            level = logging.WARNING
        elif entry is not None and entry.is_probe:
            level = logging.DEBUG
        else:
            level = logging.INFO if problem is not None or status >= 400 else self._access_level
        if log.isEnabledFor(level):
            log.log(level, "%s %s %d %.1f ms%s, id %s%s", exchange.method, _safe(exchange.path), status,
                    exchange.elapsed_s * 1000, _note(exchange), exchange.request_id, _reason(exchange))  # fmt: skip

    async def _generate(self, exchange: Exchange) -> None:
        if exchange.path != INFERENCE:
            await self._services.pipeline.run(Call(exchange, exchange.path))
            return
        config = self._services.config
        call = InferenceCall(
            exchange, context_window=config.context_window, max_context_length=config.max_context_length
        )
        await self._services.pipeline.run(call)

    # -- models

    async def models(self, exchange: Exchange) -> None:
        """Those the key may use."""
        if self._services.is_local:
            await self._page(exchange)
            return
        exchange.reply(msgspec.json.encode({"object": "list", "data": self._listed(exchange.key)}))

    async def model(self, exchange: Exchange) -> None:
        if self._services.is_local:
            await self._page(exchange)
            return
        name = exchange.path.removeprefix("/v1/models/")
        for entry in self._listed(exchange.key):
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
                "root": _root(entry, key),
                "parent": entry.parent,
                "max_model_len": entry.max_model_len,
                **({} if entry.adapter_digest is None else {"digest": entry.adapter_digest}),
            }
            for name, entry in self._services.router.public_models().items()
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
            await self._page(exchange)
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

    async def _page(self, exchange: Exchange) -> None:
        answer = await self._ask_local(exchange)
        content_type = answer.headers.get("content-type", "application/json")
        names = ("retry-after", "x-process-time", TRUST_SALT_HEADER)
        passed = [(name, value) for name, value in answer.headers.items() if name in names]
        exchange.reply(answer.body, status=answer.status, content_type=content_type, headers=passed)


def _root(entry: ModelEntry, key: Key) -> str:
    """Of an adapter, only those who may load one see where it came from."""
    hidden = entry.parent is not None and not key.may("admin")
    return (entry.parent if hidden else entry.root) or entry.id


def _note(exchange: Exchange) -> str:
    note = "" if exchange.tokens is None else f", {exchange.tokens[0]}+{exchange.tokens[1]} tokens"
    if exchange.problem is not None and 0 < exchange.status < 400:
        return f"{note}, broken off"
    return f"{note}, {exchange.gone}" if exchange.gone and exchange.problem is None else note


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
