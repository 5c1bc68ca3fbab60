"""Pools as a backend of the gateway's pipeline, in the same process: a `Transport` (gateway/backends/transport.py).

Does: find the pool and the handler for a path and a model, hand replies to a sink, turn errors into replies. Does not: know
HTTP, keys or records; the gateway in front of it does. Nor start or stop pools.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tonle.edge.client import TIMEOUT, Sink, UpstreamError
from tonle.errors import NotFound, TonleError
from tonle.observe.trace_context import TraceContext
from tonle.protocol.adapters import unknown_model
from tonle.protocol.answers import Answer
from tonle.protocol.errors import error_reply
from tonle.protocol.media_paths import POOL_HEADER
from tonle.protocol.multipart import is_form, parse_form
from tonle.protocol.replies import ModelEntry
from tonle.workers.builtin import OWN_PREFIX, handlers_of, load_handler, other_handlers_of
from tonle.workers.pool import WorkerPool
from tonle.workers.worker_request import WorkerRequest

log = logging.getLogger("tonle.workers")

_JSON = "application/json"


class _Named(msgspec.Struct):
    """The one field of a body that decides where it goes. Endpoints read the others."""

    model: str | None = None


class WorkersTransport:
    """Several pools; those of one path are told apart by the model a request names."""

    def __init__(self, pools: Sequence[WorkerPool]) -> None:
        """`pools` in the order of the settings: the first of a path gets what names no model."""
        self.pools = list(pools)
        self._created = int(time.time())
        self._by_path: dict[str, dict[str, tuple[WorkerPool, str]]] = {}  # by path, by model: the pool, its handler
        made_for = [(pool, handlers_of(pool.config.kind, pool.name)) for pool in self.pools]
        others = [(pool, other_handlers_of(pool.config.kind)) for pool in self.pools]
        for pool, handlers in made_for + others:
            for path, handler in handlers.items():
                self._by_path.setdefault(path, {}).setdefault(pool.model, (pool, handler))

    @property
    def paths(self) -> list[str]:
        """That are answered with a POST."""
        return list(self._by_path)

    def models(self) -> dict[str, ModelEntry]:
        """All names that can be asked for."""
        return {
            pool.model: ModelEntry(id=pool.model, created=self._created, owned_by="tonle", root=pool.model)
            for pool in self.pools
        }

    async def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str], sink: Sink, *, first_s: float,
        silence_s: float,
    ) -> None:  # fmt: skip
        request = WorkerRequest(path, body, {name.lower(): value for name, value in headers.items()})
        if method != "POST" or path not in self._by_path:
            self._look(method, path, sink)
            return
        timed = _TimedSink(sink)
        try:
            pool, handler = self._find(request)
            timed.pool = pool.name
            async with asyncio.timeout(first_s if math.isfinite(first_s) else None) as timeout:
                timed.heard = lambda: timeout.reschedule(_after(silence_s))
                await load_handler(handler)(request, pool, timed)
        except TimeoutError:
            waited_s = silence_s if timed.began else first_s
            raise UpstreamError(TIMEOUT, f"nothing came for {waited_s:g} s", began=timed.began) from None
        except UpstreamError:
            raise
        except Exception as error:
            if not isinstance(error, TonleError):
                log.exception("POST %s failed, id %s", path, request.header("x-request-id"), extra=_about(request))
            if timed.began:  # a part of the reply is out; it can only be cut off
                raise UpstreamError("worker failed", str(error), began=True) from error
            timed.heard = lambda: None  # there is nothing more to wait for
            _send_error(timed, error)

    def close(self) -> None:
        """Nothing is held."""

    # -- which pool

    def _find(self, request: WorkerRequest) -> tuple[WorkerPool, str]:
        """Raises `UnknownModel`."""
        found = self._by_path[request.path]
        model = named_model(request)
        if not model or request.path.startswith(OWN_PREFIX):
            return next(iter(found.values()))
        if model not in found:
            raise unknown_model(model, f"{request.path} has {', '.join(found)}")
        return found[model]

    # -- what is known at once

    def _look(self, method: str, path: str, sink: Sink) -> None:
        pages: dict[str, Callable[[], tuple[int, Any]]] = {
            "/v1/models": self._models_page,
            "/health": self._health_page,
            "/health/ready": self._ready_page,
        }
        try:
            if method == "GET" and path.startswith("/v1/models/"):
                status, page = 200, self._model_page(path.removeprefix("/v1/models/"))
            elif method == "GET" and path in pages:
                status, page = pages[path]()
            else:
                raise NotFound(f"{path} is not served by these workers, only {', '.join(self._by_path) or 'nothing'}")
        except TonleError as error:
            _send_error(sink, error)
            return
        sink.head(status, {"content-type": _JSON})
        sink.data(msgspec.json.encode(page))

    def _models_page(self) -> tuple[int, Any]:
        return 200, {"object": "list", "data": [self._model_page(name) for name in self.models()]}

    def _model_page(self, name: str) -> dict[str, Any]:
        for pool in self.pools:
            if pool.model == name:
                return {
                    "id": name, "object": "model", "created": self._created, "owned_by": "tonle", "root": name,
                    "parent": None, "kind": pool.config.kind, "facts": pool.facts,
                }  # fmt: skip
        raise unknown_model(name, f"this server has {', '.join(self.models())}")

    def why_not_ready(self) -> str | None:
        reasons = (f"{pool.name}: {reason}" for pool in self.pools if (reason := pool.why_not_ready()) is not None)
        return next(reasons, None)

    def _ready_page(self) -> tuple[int, Any]:
        reason = self.why_not_ready()
        if reason is None:
            return 200, {"status": "ready"}
        pool = next((pool.name for pool in self.pools if pool.why_not_ready() is not None), None)
        return 503, {"status": "not ready", "reason": reason, "pool": pool}

    def _health_page(self) -> tuple[int, Any]:
        reason = self.why_not_ready()
        pools = [
            {
                "name": pool.name, "model": pool.model, "kind": pool.config.kind, "reason": pool.why_not_ready(),
                "instances_ready": pool.num_ready, "running": pool.num_running, "waiting": pool.num_waiting,
            }
            for pool in self.pools
        ]  # fmt: skip
        status = "healthy" if reason is None else "unhealthy"
        return 200 if reason is None else 503, {"status": status, "reason": reason, "pools": pools}


class _TimedSink:
    """Hands on, says which pool answers, and tells when something came."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.began = False
        self.pool = ""  # empty: none was found
        self.heard: Callable[[], object] = lambda: None

    def attach(self, press: Callable[[bool], None]) -> None:
        self._sink.attach(press)

    def know(self, answer: Answer) -> None:
        self._sink.know(answer)

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.began = True
        self.heard()
        self._sink.head(status, headers | {POOL_HEADER: self.pool} if self.pool else headers)

    def data(self, piece: bytes) -> None:
        self.heard()
        self._sink.data(piece)


def named_model(request: WorkerRequest) -> str | None:
    """The model a request names, in JSON or in a form; None if it names none, or its JSON is wrong (its endpoint will say so).
    Raises `InvalidRequest`."""
    content_type = request.header("content-type")
    if is_form(content_type):
        return parse_form(request.body, content_type).text("model")
    try:
        return msgspec.json.decode(request.body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _after(seconds: float) -> float | None:
    """A moment of the event loop's clock."""
    return asyncio.get_running_loop().time() + seconds if math.isfinite(seconds) else None


def _send_error(sink: Sink, error: BaseException) -> None:
    reply = error_reply(error)
    sink.head(reply.status, {"content-type": _JSON, **dict(reply.headers)})
    sink.data(msgspec.json.encode(reply.body))


def _about(request: WorkerRequest) -> dict[str, Any]:
    """Which request a log line is about, for lines as JSON."""
    trace = TraceContext.of(request.headers)
    trace_id = {} if trace is None else {"trace_id": trace.trace_id}
    return {"fields": {"request_id": request.header("x-request-id"), **trace_id}}
