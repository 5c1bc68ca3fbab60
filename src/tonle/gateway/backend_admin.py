"""Managing the backends of a running gateway over HTTP. Every endpoint here needs a key with scope admin; to list, dashboard.

Does: list, add, change, drain, remove. Does not: check the key (`routes.py`), or find backends (`discovery/`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tonle.config.gateway import backend_name
from tonle.config.routing import BackendConfig, Name, Positive, Price, Share
from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest
from tonle.gateway.backends.backend import SETTINGS, Backend
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.dashboard.query import Query
from tonle.gateway.discovery.added_backends import AddedBackends
from tonle.gateway.discovery.discovery import Discovery
from tonle.gateway.discovery.fleet import Fleet
from tonle.gateway.refusals import Conflict
from tonle.observe.backend_figures import BackendFigures
from tonle.protocol.parse import parse

PATH = "/admin/backends"
UNTIL_RESTART = "until this gateway is restarted"


class BackendChanges(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of PATCH /admin/backends/NAME: what is left out stays; null is the gateway's default."""

    weight: Annotated[float, Meta(gt=0)] | UnsetType = UNSET
    share: Share | UnsetType | None = UNSET
    role: Literal["any", "prefill", "decode"] | UnsetType = UNSET
    length: Literal["any", "short", "long"] | UnsetType = UNSET
    region: Name | UnsetType | None = UNSET
    max_concurrent: Positive | UnsetType | None = UNSET
    max_queued: Annotated[int, Meta(ge=0)] | UnsetType | None = UNSET
    timeout_s: Annotated[float, Meta(gt=0)] | UnsetType | None = UNSET
    price_per_hour: Price | UnsetType | None = UNSET
    draining: bool | UnsetType = UNSET

    def given(self) -> dict[str, Any]:
        found = ((name, getattr(self, name)) for name in self.__struct_fields__ if name != "draining")
        return {name: value for name, value in found if value is not UNSET}


class BackendAdmin:
    def __init__(
        self,
        pool: BackendPool,
        fleet: Fleet,
        discovery: Discovery | None,
        added: AddedBackends | None,
        figures: BackendFigures | None,
    ) -> None:
        """`added` is None where the engine of this process is the only backend there can be."""
        self._pool = pool
        self._fleet = fleet
        self._discovery = discovery
        self._added = added
        self._figures = figures

    async def list_all(self, exchange: Exchange) -> None:
        body: dict[str, Any] = {"backends": [shown_backend(backend) for backend in self._pool.backends]}
        if self._discovery is not None:
            problems = self._discovery.problems
            body["sources"] = [
                {"name": source.name, "problem": problems.get(source.name)} for source in self._discovery.sources
            ]
        _send(exchange, body)

    async def show(self, exchange: Exchange) -> None:
        _send(exchange, shown_backend(self._named(exchange)))

    async def add(self, exchange: Exchange) -> None:
        """POST /admin/backends, with the fields that a backend has in the settings file; ?like=NAME: others as NAME has them."""
        added = self._need_added()
        row, _ = parse(exchange.body, BackendConfig)
        if like := Query(exchange.query).text("like"):
            row = _completed(row, self._pool.named(like).row)
        old = self._pool.find(backend_name(row))
        if old is not None and not old.leaving:
            raise Conflict(f"there is a backend {old.name} already, from {old.source}; remove it first, or choose another name",
                           param="name")  # fmt: skip
        backend = await added.put(row)
        _send(exchange, shown_backend(backend) | {"kept": added.place}, status=201)

    async def change(self, exchange: Exchange) -> None:
        """PATCH /admin/backends/NAME."""
        changes, _ = parse(exchange.body, BackendChanges)
        backend, kept = self._staying(exchange), UNTIL_RESTART
        given = changes.given()
        if given and self._added is not None and backend.source == self._added.name:
            backend, kept = await self._added.put(msgspec.structs.replace(backend.row, **given)), self._added.place
        elif given:
            self._fleet.change(backend, given)
        if changes.draining is not UNSET:
            backend.draining = changes.draining
        _send(exchange, shown_backend(backend) | {"kept": kept})

    async def remove(self, exchange: Exchange) -> None:
        """DELETE /admin/backends/NAME: nothing new is sent there; it is gone when what runs has ended."""
        backend = self._staying(exchange)
        added = self._need_added()
        if backend.source == added.name:
            await added.remove(backend)
            _send(exchange, shown_backend(backend) | {"kept": added.place}, status=202)
            return
        if backend.source != SETTINGS:
            raise Conflict(f"{backend.name} was found by {backend.source}, which would bring it back: remove it there, or drain "
                           "it here")  # fmt: skip
        self._fleet.remove(backend)
        _send(exchange, shown_backend(backend) | {"kept": UNTIL_RESTART}, status=202)

    async def list_figures(self, exchange: Exchange) -> None:
        """How each backend has answered since this process began: counts that only grow."""
        _send(exchange, {"backends": {} if self._figures is None else self._figures.by_name})

    async def probe(self, exchange: Exchange) -> None:
        """POST /admin/backends/NAME/probe: ask it now, and tell what it said."""
        backend = self._acted_on(exchange)
        await self._pool.refresh([backend])
        _send(exchange, shown_backend(backend))

    async def drain(self, exchange: Exchange) -> None:
        """POST /admin/backends/NAME/drain: finish what runs there, send nothing new."""
        await self._set_draining(exchange, draining=True)

    async def resume(self, exchange: Exchange) -> None:
        await self._set_draining(exchange, draining=False)

    async def _set_draining(self, exchange: Exchange, *, draining: bool) -> None:
        backend = self._acted_on(exchange)
        backend.draining = draining
        _send(exchange, shown_backend(backend))

    def _acted_on(self, exchange: Exchange) -> Backend:
        """Of a path /admin/backends/NAME/ACTION."""
        return self._pool.named(exchange.path.removeprefix(f"{PATH}/").rpartition("/")[0])

    def _named(self, exchange: Exchange) -> Backend:
        return self._pool.named(exchange.path.removeprefix(f"{PATH}/"))

    def _staying(self, exchange: Exchange) -> Backend:
        """Raises `Conflict` if it is on its way out already."""
        backend = self._named(exchange)
        if backend.leaving:
            raise Conflict(f"{backend.name} is being removed: it finishes what it has")
        return backend

    def _need_added(self) -> AddedBackends:
        if self._added is None:
            raise InvalidRequest(
                "this server's only backend is its own engine; put `tonle gateway` in front of several"
            )
        return self._added


def shown_backend(backend: Backend) -> dict[str, Any]:
    return {
        "name": backend.name,
        "url": backend.row.url,
        "source": backend.source,
        "kind": backend.kind,
        "role": backend.row.role,
        "length": backend.row.length,
        "region": backend.region,
        "weight": backend.row.weight,
        "share": backend.row.share,
        "models": list(backend.models),
        "available": backend.available and backend.breaker.state != "open",  # to every caller
        "unhealthy_reason": backend.unhealthy_reason,
        "warning": backend.warning,
        "draining": backend.draining,
        "leaving": backend.leaving,
        "breaker": backend.breaker.state,
        "running": backend.gate.num_inside,
        "waiting": backend.gate.num_queued,
        "service_s": round(backend.gate.service_s, 4),
        "sent": backend.num_sent,
        "failed": backend.num_failed,
    }


def _completed(row: BackendConfig, like: BackendConfig) -> BackendConfig:
    """What `row` does not say, as `like` has it; but for its name, its share and the address of its events, which are its own. A
    key it has takes the place of the other's, wherever that one is."""
    defaults = BackendConfig(url="")
    own = ("url", "name", "share", "kv_events", *(("api_key", "api_key_env") if row.api_key or row.api_key_env else ()))
    taken = {
        field: getattr(like, field)
        for field in row.__struct_fields__
        if field not in own and getattr(row, field) == getattr(defaults, field)
    }
    return msgspec.structs.replace(row, **taken)


def _send(exchange: Exchange, body: Any, *, status: int = 200) -> None:
    exchange.reply(msgspec.json.encode(body), status=status)
