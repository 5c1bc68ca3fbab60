"""`Fleet`: which backends there should be, according to each source, and the steps from what is there to that.

Does: add, change, replace and remove backends of one source at a time; keep an admin's changes over what a source says. Does not:
find backends (sources do), or end requests (`backends/backend_pool.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from tonle.config.gateway import GatewayConfig, backend_name, check_backend
from tonle.config.routing import BackendConfig
from tonle.errors import ConfigError
from tonle.gateway.backends.backend import Backend, http_transport
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.discovery.source import SourceLost

log = logging.getLogger("tonle.gateway")

MAX_BACKENDS = 4096  # that one source may want
CHANGEABLE = (
    "weight",
    "share",
    "role",
    "length",
    "region",
    "max_concurrent",
    "max_queued",
    "timeout_s",
    "price_per_hour",
)  # fmt: skip - of a backend that keeps its connections, its queue and its requests


class Fleet:
    """For the thread of the event loop."""

    def __init__(self, pool: BackendPool, config: GatewayConfig) -> None:
        self._pool = pool
        self._config = config
        self._wanted = {backend.name: backend.row for backend in pool.backends}  # as sources say
        self._changes: dict[str, dict[str, Any]] = {}  # an admin's, by backend
        self._refused: dict[tuple[str, str], str] = {}  # (source, backend) -> why it was not taken, as the log knows it

    def reconcile(self, source: str, rows: Iterable[BackendConfig]) -> None:
        """Make the backends of `source` those of `rows`: all that it wants. A row that cannot be used is left out, and logged.
        Raises `SourceLost` if there are far too many."""
        rows = list(rows)
        if len(rows) > MAX_BACKENDS:
            raise SourceLost(f"it lists {len(rows)} backends, and a gateway takes {MAX_BACKENDS} of one source at most")
        wanted: dict[str, BackendConfig] = {}
        for row in rows:
            if backend_name(row) in wanted:
                self._refuse(source, backend_name(row), "it is listed twice")
                continue
            wanted[backend_name(row)] = row
        for backend in [each for each in self._pool.backends if each.source == source and not each.leaving]:
            if backend.name not in wanted:
                self.remove(backend)
        for place in [place for place in self._refused if place[0] == source and place[1] not in wanted]:
            del self._refused[place]
        for name, row in wanted.items():
            try:
                self.put(source, row)
                self._refused.pop((source, name), None)
            except ConfigError as error:
                self._refuse(source, name, str(error))

    def check(self, source: str, row: BackendConfig) -> None:
        """Whether it can be used, and its name belongs to no other source. Raises `ConfigError`."""
        check_backend(row, self._config)
        http_transport(row)
        if row.kv_events is not None:
            raise ConfigError("kv_events is for backends in the settings file: only those are listened to; leave it out, and "
                              "prompts go where such ones were sent last", param="kv_events")  # fmt: skip
        old = self._staying(backend_name(row))
        if old is not None and old.source != source:
            raise ConfigError(f"there is a backend {old.name} already, from {old.source}; give each a name of its own",
                              param="name")  # fmt: skip

    def put(self, source: str, row: BackendConfig) -> Backend:
        """Add the backend, or make it what `row` says. Raises `ConfigError`."""
        name = backend_name(row)
        old = self._staying(name)
        if old is not None and old.source == source and self._wanted.get(name) == row:
            return old
        self.check(source, row)
        effective = msgspec.structs.replace(row, **self._changes.get(name, {}))
        if old is not None and _may_stay(old.row, effective):
            self._wanted[name] = row
            old.change(effective, self._config)
            return old
        backend = Backend(effective, self._config, source=source)
        self._wanted[name] = row
        if old is not None:
            self._pool.remove(old, grace_s=self._config.backend_drain_s)
        self._pool.add(backend)
        log.info("backend %s (%s) is new, from %s", name, row.url, source)
        return backend

    def change(self, backend: Backend, changes: dict[str, Any]) -> None:
        """An admin's wish, until this gateway ends or the backend leaves."""
        self._changes[backend.name] = self._changes.get(backend.name, {}) | changes
        backend.change(msgspec.structs.replace(backend.row, **changes), self._config)

    def remove(self, backend: Backend) -> None:
        """It gets nothing new, and is gone when what it has is done, after `backend_drain` at the latest."""
        if not backend.leaving:
            log.info("backend %s leaves", backend.name)
            self._wanted.pop(backend.name, None)
            self._changes.pop(backend.name, None)
            self._pool.remove(backend, grace_s=self._config.backend_drain_s)

    def _staying(self, name: str) -> Backend | None:
        backend = self._pool.find(name)
        return None if backend is None or backend.leaving else backend

    def _refuse(self, source: str, name: str, why: str) -> None:
        if self._refused.get((source, name)) != why:
            self._refused[source, name] = why
            log.warning("backend %s of %s is left out: %s", name, source, why)


def _may_stay(old: BackendConfig, new: BackendConfig) -> bool:
    """Only what can be changed in a running backend differs."""
    return all(getattr(old, name) == getattr(new, name) for name in old.__struct_fields__ if name not in CHANGEABLE)
