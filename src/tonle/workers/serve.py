"""Worker pools from settings, and behind HTTP: beside an engine (`LocalWorkers`), or alone (`build_server`).

Does: put pools, transport and gateway together, start and stop the pools around a server. Does not: know a kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from pathlib import Path

from tonle.config.gateway import GatewayConfig
from tonle.config.workers import WorkerConfig, WorkerServerConfig
from tonle.errors import ConfigError
from tonle.gateway.gateway import NO_LIMIT, Gateway
from tonle.gateway.local_server import LocalServer
from tonle.gateway.local_workers import LocalWorkers, WorkersAlone
from tonle.workers.builtin import handlers_of
from tonle.workers.pool import WorkerPool
from tonle.workers.pool_config import PoolConfig
from tonle.workers.pool_metrics import PoolMetrics
from tonle.workers.transport import WorkersTransport

_SHARED = {entry.name for entry in fields(WorkerServerConfig)} & {entry.name for entry in fields(GatewayConfig)}


class ServedPools:
    """The pools of one server. Raises `ConfigError`."""

    def __init__(self, rows: Sequence[WorkerConfig]) -> None:
        metrics = PoolMetrics()
        self.pools = [WorkerPool(pool_config(row), metrics=metrics) for row in rows]
        for what in ("name", "model"):
            _check_different(what, [getattr(pool, what) for pool in self.pools])
        transport = WorkersTransport(self.pools)
        self.local = LocalWorkers(
            transport=transport, models=transport.models, by_path=_by_path(self.pools), metrics=metrics
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Started; stopped at the end, whatever happened."""
        try:
            for pool in self.pools:
                await pool.start()
            yield
        finally:
            await asyncio.gather(*(pool.stop() for pool in self.pools))

    async def wait_ready(self) -> None:
        """Raises what kept one from starting."""
        await asyncio.gather(*(pool.wait_ready() for pool in self.pools))


def pool_config(row: WorkerConfig) -> PoolConfig:
    """Raises `ConfigError`."""
    try:
        values = row.pool_values()
    except ValueError as error:
        raise ConfigError(f"the worker pool {row.kind}: a time or a size {error}", param="workers") from None
    if row.served_name is None and row.model is not None and _is_path(row.model):
        values["served_name"] = Path(row.model).resolve().name  # callers need not know where it lies
    return PoolConfig(**values)


def build_server(served: ServedPools, settings: WorkerServerConfig) -> Gateway:
    """Raises `ConfigError`. The pools have queues of their own and restart by themselves: neither is guarded twice."""
    local = LocalServer(
        transport=WorkersAlone(served.local),
        models=served.local.models,
        metrics=None,
        context_length=lambda: None,
        on_drain=lambda: None,
        workers=served.local,
    )
    shared = {name: getattr(settings, name) for name in _SHARED}
    config = GatewayConfig(**shared, backend_timeout_s=math.inf, breaker_failures=NO_LIMIT, retries=0)
    return Gateway(config, local=local)


def _by_path(pools: Sequence[WorkerPool]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for pool in pools:
        for path in handlers_of(pool.config.kind, pool.name):
            found[path] = (*found.get(path, ()), pool.model)
    return found


def _is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or Path(model).expanduser().exists()


def _check_different(what: str, names: list[str]) -> None:
    if same := sorted({name for name in names if names.count(name) > 1}):
        key = "name" if what == "name" else "served_name"
        raise ConfigError(
            f"two worker pools have the {what} {same[0]}; give one of them another {key}", param="workers"
        )
