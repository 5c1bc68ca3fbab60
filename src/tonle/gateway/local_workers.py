"""Worker pools of this process, alone or beside its engine, as what `LocalServer` needs.

Does: decide by path and model whether an engine or a pool answers; put their lists of models and their health together. Does
not: know pools (`tonle.workers`) or engines (`tonle.replica`): both are a `Transport` to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import Sink
from tonle.gateway.backends.transport import TRUST_SALT_HEADER, Transport
from tonle.protocol.embeddings import RERANK_PATHS, SCORE_PATHS
from tonle.protocol.replies import ModelEntry

_JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorkers:
    transport: Transport
    models: Callable[[], dict[str, ModelEntry]]
    by_path: Mapping[str, tuple[str, ...]]  # path -> the models that answer it; the first where a request names none
    metrics: Collector

    def default_model(self, path: str) -> str | None:
        """For a request that names none."""
        return next(iter(self.by_path.get(path, ())), None)


class _Named(msgspec.Struct):
    model: str | None = None


def _no_pressure(pressed: bool) -> None:
    """A pool's answers are bounded, and are not held back for a caller who reads slowly; the server drops one who stalls."""


class WorkersAlone:
    """A server of nothing but pools. There are no prefixes to keep apart, so a gateway need not worry about salts."""

    def __init__(self, workers: LocalWorkers) -> None:
        self._workers = workers

    async def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str], sink: Sink, *, first_s: float,
        silence_s: float,
    ) -> None:  # fmt: skip
        pools = self._workers.transport
        if method == "POST":
            sink.attach(_no_pressure)
            await pools.send(method, path, body, headers, sink, first_s=first_s, silence_s=silence_s)
            return
        reply = BufferedReply()
        await pools.send(method, path, body, headers, reply, first_s=first_s, silence_s=silence_s)
        sink.head(reply.status, reply.headers | {TRUST_SALT_HEADER: "1"})
        sink.data(reply.body)

    def close(self) -> None:
        self._workers.transport.close()


class EngineAndWorkers:
    """A `Transport`: the engine of this process, and its pools."""

    def __init__(self, engine: Transport, workers: LocalWorkers) -> None:
        self._engine = engine
        self._workers = workers

    async def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str], sink: Sink, *, first_s: float,
        silence_s: float,
    ) -> None:  # fmt: skip
        if method == "GET" and (joined := _JOINED.get(path)) is not None:
            told: list[BufferedReply] = []
            for part in (self._engine, self._workers.transport):
                reply = BufferedReply()
                await part.send(method, path, body, headers, reply, first_s=first_s, silence_s=silence_s)
                told.append(reply)
            status, page = joined(*told)
            sink.head(status, told[0].headers | _JSON)
            sink.data(msgspec.json.encode(page))
            return
        part = self._engine
        if self._is_for_pools(method, path, body):
            part = self._workers.transport
            sink.attach(_no_pressure)
        await part.send(method, path, body, headers, sink, first_s=first_s, silence_s=silence_s)

    def _is_for_pools(self, method: str, path: str, body: bytes) -> bool:
        if method == "GET":
            return path.removeprefix("/v1/models/") in self._workers.models()
        is_theirs = path in self._workers.by_path
        if path not in OF_BOTH:
            return is_theirs
        try:
            named = msgspec.json.decode(body, type=_Named).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return is_theirs  # the endpoint says what is wrong
        return is_theirs if named is None else named in self._workers.models()

    def close(self) -> None:
        self._engine.close()
        self._workers.transport.close()


# Paths that an engine answers, too: the model that is named decides.
OF_BOTH = ("/v1/embeddings", *RERANK_PATHS, *SCORE_PATHS)


def _list(engine: BufferedReply, pools: BufferedReply) -> tuple[int, Any]:
    """The engine's while it is not ready: it says so, and so does the server."""
    one = msgspec.json.decode(engine.body)
    if engine.status != 200:
        return engine.status, one
    return 200, {**one, "data": [*one["data"], *msgspec.json.decode(pools.body)["data"]]}


def _health(engine: BufferedReply, pools: BufferedReply) -> tuple[int, Any]:
    """The first that is not well decides."""
    one, other = msgspec.json.decode(engine.body), msgspec.json.decode(pools.body)
    worse = other if engine.status == 200 and pools.status != 200 else {}
    page = {**other, **one, **{name: worse[name] for name in ("status", "reason", "pool") if name in worse}}
    return max(engine.status, pools.status), page


_JOINED: dict[str, Callable[[BufferedReply, BufferedReply], tuple[int, Any]]] = {
    "/v1/models": _list,
    "/health": _health,
    "/health/ready": _health,
}
