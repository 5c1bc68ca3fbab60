"""Which handler answers which path, the check of every head, and the frame around every handler: errors, one log line,
one count.

Does: route, guard by scope, turn errors into replies. Does not: know the order of a request's stages (`pipeline.py`) or
what web pages may do (`web_pages.py`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from tonle.edge.exchange import Exchange
from tonle.errors import TonleError
from tonle.gateway.adapters import NO_KEYS_TO_LOAD
from tonle.gateway.apis.error_shapes import is_messages, own_shape
from tonle.gateway.apis.ollama.pages import OllamaPages, managing_refusal
from tonle.gateway.apis.responses.api import INPUT_ITEMS
from tonle.gateway.apis.responses.request import PATH as RESPONSES
from tonle.gateway.apis.translated import TRANSLATED, call_for
from tonle.gateway.backend_admin import PATH as BACKENDS
from tonle.gateway.backend_admin import BackendAdmin
from tonle.gateway.dashboard.pages import PREFIX, Dashboard
from tonle.gateway.entry import NOTHING, Entry, Found
from tonle.gateway.experiments import PATH as EXPERIMENTS
from tonle.gateway.explain_page import PATTERN as EXPLAIN
from tonle.gateway.explain_page import PREFIX as REQUESTS
from tonle.gateway.explain_page import SUFFIX as EXPLAINED
from tonle.gateway.explain_page import ExplainPage
from tonle.gateway.fallback_admin import PATH as FALLBACKS
from tonle.gateway.fallback_admin import FallbackAdmin
from tonle.gateway.log_fields import about
from tonle.gateway.own_pages import OwnPages
from tonle.gateway.refusals import Forbidden, NoHandler
from tonle.gateway.services import Services
from tonle.gateway.sleep_pages import SleepPages
from tonle.gateway.web_pages import WebPages, check_form, check_json
from tonle.protocol.adapters import LOAD_PATH, UNLOAD_PATH
from tonle.protocol.embeddings import RERANK_PATHS, SCORE_PATHS
from tonle.protocol.errors import (
    ErrorReply,
    error_reply,
    no_such_path,
    not_supported_yet,
    not_switched_on,
    wrong_method,
)
from tonle.protocol.media_paths import FORM_PATHS, WORKERS
from tonle.protocol.unsupported_paths import how_to_switch_on, unsupported_feature
from tonle.telemetry.logs import one_line

log = logging.getLogger("tonle.http")

# Everything a model answers goes through the pipeline, and is on record.
PIPED = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", *RERANK_PATHS, *SCORE_PATHS, "/tokenize", "/detokenize",
)  # fmt: skip
PATHS_HINT = "GET /v1/models lists the models; docs/gateway.md lists the paths of a gateway."
DOCS_HINT = "GET /docs lists what there is."

STATUS_CALLER_GONE = 499  # for the log and the metrics only: the caller hung up before the reply began


class Routes:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._pages = WebPages(services.config)
        # A server of one model tells of each request; a gateway in front of many tells of those that fail.
        self._access_level = logging.INFO if services.is_local else logging.DEBUG
        metrics = services.local_metrics
        self._count = services.metrics.count_http if metrics is None else metrics.count_http
        admin, backends = services.admin, services.backend_admin
        pages, explain = OwnPages(services), ExplainPage(services)
        loading = None if services.enable_lora else NO_KEYS_TO_LOAD
        table: dict[str, dict[str, Entry]] = {
            "/v1/models": {"GET": Entry("models", pages.models)},
            "/health": {"GET": Entry(None, pages.health, is_probe=True)},
            "/health/live": {"GET": Entry(None, pages.live, is_probe=True)},
            "/health/ready": {"GET": Entry(None, pages.ready, is_probe=True)},
            "/version": {"GET": Entry(None, pages.version, is_probe=True)},
            "/metrics": {"GET": Entry("metrics", pages.metrics, is_probe=True)},
            "/cache/clear": {"POST": Entry("admin", pages.clear_cache, unless_keys=None)},
            LOAD_PATH: {"POST": Entry("admin", services.adapters.load, takes_json=True, unless_keys=loading)},
            UNLOAD_PATH: {"POST": Entry("admin", services.adapters.unload, takes_json=True, unless_keys=loading)},
            "/admin/keys": {
                "GET": Entry("dashboard", admin.list_keys),
                "POST": Entry("admin", admin.create_key, takes_json=True),
            },
            BACKENDS: {"GET": Entry("dashboard", backends.list_all)},
            EXPERIMENTS: {"GET": Entry("dashboard", services.experiments.list_all)},
        }
        table |= _ollama_pages(OllamaPages(services))
        piped = Entry("models", self._generate, takes_json=True, is_piped=True)
        table |= {path: {"POST": piped} for path in (*PIPED, *TRANSLATED)}
        form = Entry("models", self._generate, takes_form=True, is_piped=True)
        table |= {path: {"POST": form if path in FORM_PATHS else piped} for path in services.media_paths}
        self._worker = (
            NOTHING if services.is_local else Found(f"{WORKERS}{{name}}", {"POST": piped})
        )  # a local one is exact
        self._max_upload_bytes = min(services.config.max_upload_bytes, services.config.request_memory_bytes)
        table |= _local_pages(services, pages) if services.is_local else _gateway_pages(services)
        self._exact = {path: Found(path, methods) for path, methods in table.items()}
        self._model = Found("/v1/models/{id}", {"GET": Entry("models", pages.model)})
        self._response = Found(
            f"{RESPONSES}/{{id}}",
            {"GET": Entry("models", services.responses.retrieve), "DELETE": Entry("models", services.responses.delete)},
        )
        self._input_items = Found(
            f"{RESPONSES}/{{id}}{INPUT_ITEMS}", {"GET": Entry("models", services.responses.input_items)}
        )
        # It looks for a key itself: one that may use models, or one that may see the dashboard.
        self._explain = Found(EXPLAIN, {"GET": Entry(None, explain.reply)})
        self._key = Found("/admin/keys/{id}", {"DELETE": Entry("admin", admin.revoke_key)})
        self._drain = Found(f"{BACKENDS}/{{name}}/drain", {"POST": Entry("admin", backends.drain)})
        self._resume = Found(f"{BACKENDS}/{{name}}/resume", {"POST": Entry("admin", backends.resume)})
        probe = Found(f"{BACKENDS}/{{name}}/probe", {"POST": Entry("admin", backends.probe)})
        self._probe = NOTHING if services.is_local else probe
        self._backend = NOTHING if services.is_local else _one_backend(backends)
        self._start = Found(f"{EXPERIMENTS}/{{name}}/start", {"POST": Entry("admin", services.experiments.start)})
        self._stop = Found(f"{EXPERIMENTS}/{{name}}/stop", {"POST": Entry("admin", services.experiments.stop)})
        self.dashboard = Dashboard(services, explain)

    @property
    def paths(self) -> list[str]:
        """Those with one fixed name."""
        return list(self._exact)

    @property
    def patterns(self) -> list[str]:
        """Without those of the dashboard: its own page alone asks them."""
        named = (
            self._model, self._response, self._input_items, self._explain, self._key, self._drain, self._resume, self._start,
            self._stop, *(() if self._services.is_local else (self._backend, self._probe, self._worker)),
        )  # fmt: skip
        return [*self._exact, *(found.pattern for found in named)]

    def check_head(self, exchange: Exchange) -> None:
        """Called before any of the body is kept. Raises what the request is refused with; finds the caller's key."""
        services, method = self._services, exchange.method
        services.proxies.place(exchange)
        if "origin" in exchange.headers:
            self._pages.answer_origin(exchange)
        if is_messages(exchange.path):  # Anthropic's name for it
            exchange.extra_headers.append(("request-id", exchange.request_id))
        found = self._find(exchange.path)
        exchange.extra_headers += found.headers
        entry = found.methods.get("GET" if method == "HEAD" else method)
        exchange.wants_body = entry is not None and (entry.takes_json or entry.takes_form)
        if method == "OPTIONS":
            return
        if entry is None:
            raise NoHandler(self._missing(exchange, found))
        is_dashboard, has_keys = exchange.path.startswith(PREFIX), services.auth.has_keys
        if is_dashboard or self._pages.checks_hosts or not has_keys:
            self._pages.check(exchange, has_keys=has_keys, is_dashboard=is_dashboard)
        if entry.scope is not None:
            self._admit(exchange, entry)
        if entry.takes_json:
            check_json(exchange)
        elif entry.takes_form:
            exchange.max_body_bytes = self._max_upload_bytes
            check_form(exchange)

    async def __call__(self, exchange: Exchange) -> None:
        found = self._find(exchange.path)
        try:
            await self._handle(exchange, found)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, TonleError):
                exchange.problem = f"{type(error).__name__}: {error}"
                log.exception("%s %s failed, id %s", exchange.method, _safe(exchange.path), exchange.request_id,
                              extra=about(exchange))  # fmt: skip
            _send_error(exchange, error.reply if isinstance(error, NoHandler) else error_reply(error))
        finally:
            self._account(exchange, found)
            exchange.refusal = None  # its traceback leads back here: a cycle

    def _find(self, path: str) -> Found:
        if (found := self._exact.get(path)) is not None:
            return found
        if path.startswith("/v1/models/"):
            return self._model
        if path.startswith(f"{RESPONSES}/") and unsupported_feature(path) is None:
            _, slash, below = path.removeprefix(f"{RESPONSES}/").partition("/")
            return self._response if not slash else self._input_items if f"/{below}" == INPUT_ITEMS else NOTHING
        if path.startswith(REQUESTS) and path.endswith(EXPLAINED):
            return self._explain
        if path.startswith("/admin/keys/"):
            return self._key
        if path.startswith(f"{BACKENDS}/"):
            acting = {"drain": self._drain, "resume": self._resume, "probe": self._probe}
            return acting.get(path.rpartition("/")[2], self._backend)
        if path.startswith(f"{EXPERIMENTS}/") and path.endswith(("/start", "/stop")):
            return self._start if path.endswith("/start") else self._stop
        if path.startswith(WORKERS):
            return self._worker
        return self.dashboard.find(path) if path.startswith(PREFIX) else NOTHING

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
        if (refusal := managing_refusal(exchange.path)) is not None:
            return refusal
        if (advice := how_to_switch_on(exchange.path)) is not None:
            return not_switched_on(path, advice)
        hint = PATHS_HINT if self._services.local_metrics is None else DOCS_HINT
        feature = unsupported_feature(exchange.path)
        return no_such_path(path, hint) if feature is None else not_supported_yet(feature, hint)

    def _admit(self, exchange: Exchange, entry: Entry) -> None:
        auth, scope = self._services.auth, entry.scope
        assert scope is not None
        if scope in ("admin", "dashboard") and not auth.has_keys:
            if self._services.is_local and entry.unless_keys is not None:
                raise Forbidden(entry.unless_keys)
            if scope == "dashboard":
                self.dashboard.admit_without_key(exchange)
                return
            if self._services.is_local:
                return
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
            took_ms, path = exchange.elapsed_s * 1000, _safe(exchange.path)
            log.log(level, "%s %s %d %.1f ms%s, id %s%s", exchange.method, path, status, took_ms, _note(exchange),
                    exchange.request_id, _reason(exchange), extra=_fields(exchange, path, status, took_ms))  # fmt: skip

    async def _generate(self, exchange: Exchange) -> None:
        await self._services.pipeline.run(call_for(exchange, self._services))


def _one_backend(backends: BackendAdmin) -> Found:
    return Found(
        f"{BACKENDS}/{{name}}",
        {
            "GET": Entry("dashboard", backends.show),
            "PATCH": Entry("admin", backends.change, takes_json=True),
            "DELETE": Entry("admin", backends.remove),
        },
    )


def _sleep_pages(pages: SleepPages) -> dict[str, dict[str, Entry]]:
    return {
        "/sleep": {"POST": Entry("admin", pages.sleep)},
        "/wake_up": {"POST": Entry("admin", pages.wake_up)},
        "/is_sleeping": {"GET": Entry("admin", pages.is_sleeping)},
    }


def _ollama_pages(pages: OllamaPages) -> dict[str, dict[str, Entry]]:
    return {
        "/": {"GET": Entry(None, pages.root, is_probe=True)},
        "/api/version": {"GET": Entry(None, pages.version, is_probe=True)},
        "/api/tags": {"GET": Entry("models", pages.tags)},
        "/api/ps": {"GET": Entry("models", pages.running)},
        "/api/show": {"POST": Entry("models", pages.show, takes_json=True)},
    }


def _fields(exchange: Exchange, path: str, status: int, took_ms: float) -> dict[str, Any]:
    """The same for programs."""
    prompt, completion = exchange.tokens or (None, None)
    problem = None if exchange.problem is None else one_line(exchange.problem)
    return about(
        exchange, method=exchange.method, path=path, status=status, ms=round(took_ms, 1), prompt_tokens=prompt,
        completion_tokens=completion, problem=problem,
    )  # fmt: skip


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
        body = own_shape(exchange.path, error.status, msgspec.json.encode(error.body), exchange.request_id)
        exchange.reply(body, status=error.status, headers=error.headers)


def _safe(path: str) -> str:
    """To be logged and sent back: no control characters."""
    return path.encode("unicode_escape").decode()[:200]


def _local_pages(services: Services, pages: OwnPages) -> dict[str, dict[str, Entry]]:
    """Of a server with an engine of its own."""
    if services.local_metrics is None:
        return {}
    table = {path: {"GET": Entry(None, pages.page, is_probe=True)} for path in ("/docs", "/openapi.json")}
    if services.sleeper is not None:
        table |= _sleep_pages(SleepPages(services.sleeper))
    return table


def _gateway_pages(services: Services) -> dict[str, dict[str, Entry]]:
    """Of a gateway in front of other servers."""
    backends, fallbacks = services.backend_admin, FallbackAdmin(services.router.fallbacks)
    return {
        BACKENDS: {
            "GET": Entry("dashboard", backends.list_all),
            "POST": Entry("admin", backends.add, takes_json=True),
        },
        f"{BACKENDS}/figures": {"GET": Entry("dashboard", backends.list_figures)},
        FALLBACKS: {
            "GET": Entry("dashboard", fallbacks.show),
            "PUT": Entry("admin", fallbacks.replace, takes_json=True),
        },
    }
