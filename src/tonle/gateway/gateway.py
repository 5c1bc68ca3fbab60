"""`Gateway`: the rooms put together from settings, and their life from start to end.

Does: build, start, serve, drain, stop. Does not: take part in a request (`pipeline.py`) or bind addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tonle.audit.metrics import AuditMetrics
from tonle.audit.options import from_config
from tonle.audit.trail import AuditTrail
from tonle.cache import ResponseCache
from tonle.config.gateway import GatewayConfig, default_state_db
from tonle.config.rows import BackendRow
from tonle.errors import ConfigError
from tonle.gateway.admin import Admin
from tonle.gateway.auth import Auth
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.pool import Pool
from tonle.gateway.backends.transport import InlineTransport
from tonle.gateway.http.server import HttpServer, ServerLimits
from tonle.gateway.keys.key import EVERYBODY, Limits, given
from tonle.gateway.keys.ring import KeyRing
from tonle.gateway.keys.store import KeyStore
from tonle.gateway.limits import Ledger
from tonle.gateway.pipeline import Pipeline, PipelineOptions, Stages
from tonle.gateway.proxies import Proxies
from tonle.gateway.recording import Recorder
from tonle.gateway.replay import Replay
from tonle.gateway.routes import Rooms, Routes
from tonle.gateway.routing.router import Router
from tonle.gateway.shadow import Shadows
from tonle.gateway.watchers import Sla, Watchers

log = logging.getLogger("tonle.gateway")

SAVE_S = 2.0  # how often what keys used is written to the store
NO_LIMIT = 1 << 40


class Gateway:
    """Build it on the thread it will run on; `inline` is an ASGI application that takes the place of backends."""

    def __init__(self, config: GatewayConfig, *, inline: Any = None, inline_models: tuple[str, ...] = ()) -> None:
        """Raises `ConfigError`."""
        self.config = config
        self._store = None if inline is not None else KeyStore(Path(config.state_db or default_state_db()))
        self.ring = KeyRing(_fixed_keys(config), self._store)
        self._check_exposure(inline=inline is not None)
        self.trail = _trail(config)
        self.ledger = Ledger(_default_limits(config))
        self.pool = _pool(config, inline, inline_models)
        router = Router(self.pool, config)
        cache = ResponseCache(config.cache_max_size, config.cache_ttl_s, max_bytes=config.cache_max_bytes)
        replay = Replay(cache if config.cache else None)
        auth = Auth(self.ring) if inline is None else Auth(self.ring, anybody=EVERYBODY, anywhere=True)
        self.shadows = Shadows(config.shadows, self.pool)
        watchers = Watchers(Sla(config.sla_p95_s), self.pool.backends, replay.cache, process=inline is None)
        if self.trail is not None:
            watchers.registry.register(AuditMetrics(self.trail))
        stages = Stages(
            auth=auth, ledger=self.ledger, recorder=Recorder(self.trail), replay=replay, router=router,
            shadows=self.shadows, watchers=watchers,
        )  # fmt: skip
        salt_secret = self._store.secret("salt") if self._store is not None else secrets.token_hex(32)
        options = PipelineOptions(
            retries=config.retries, keep_alive_s=config.keep_alive_s, salt_secret=salt_secret, strict=config.strict
        )
        routes = Routes(Rooms(
            config=config, auth=auth, pipeline=Pipeline(stages, options), router=router, pool=self.pool, replay=replay,
            watchers=watchers, admin=Admin(self.ring, self.ledger, self.pool), inline=inline is not None,
            proxies=Proxies(config.trusted_proxies, config.forwarded_header), is_open=lambda: not self.server.draining,
        ))  # fmt: skip
        limits = ServerLimits(max_body_bytes=config.max_body_bytes, write_timeout_s=config.write_timeout_s)
        self.server = HttpServer(routes, limits)
        self._saver: asyncio.Task[None] | None = None

    def _check_exposure(self, *, inline: bool) -> None:
        """Without keys only this machine may call a gateway; a server of one model is what its host setting says."""
        if not self.ring.empty or inline:
            return
        if not self.config.loopback:
            raise ConfigError(
                f"there is no API key, so {self.config.host} would be open to everybody: make one with "
                "`tonle keys create --name NAME` or give --api-key, or listen on 127.0.0.1",
                param="host",
            )
        log.warning("no API key is configured: every program of this machine may call, and manage, this gateway")

    async def start(self, listener: socket.socket) -> None:
        if self.trail is not None:
            await asyncio.to_thread(self.trail.start)
        if self._store is not None:
            day = self.ledger.today()
            self.ledger.load(day, await asyncio.to_thread(self._store.usage, day))
            self._saver = asyncio.create_task(self._save_often(self._store))
        self.ring.start()
        await self.pool.start()
        await self.server.start(listener)

    async def stop(self, *, drain_s: float | None = None) -> None:
        """Running requests may finish for a while; whatever happens to them is on record when this returns."""
        await self.server.stop(drain_s=self.config.drain_s if drain_s is None else drain_s)
        await self.shadows.stop()
        await self.pool.stop()
        if self.trail is not None:
            await asyncio.to_thread(self.trail.close)
        if self._saver is not None and self._store is not None:
            self._saver.cancel()
            await self._save(self._store)
        await self.ring.stop()

    async def _save_often(self, store: KeyStore) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            try:
                await self._save(store)
            except Exception:
                log.exception("what keys used could not be saved; trying again")

    async def _save(self, store: KeyStore) -> None:
        unsaved, self.ledger.unsaved = self.ledger.unsaved, {}
        try:
            for day in {day for day, _ in unsaved}:
                tokens = {key_id: used for (its_day, key_id), used in unsaved.items() if its_day == day}
                await asyncio.to_thread(store.add_usage, day, tokens)
        except Exception:
            for place, used in unsaved.items():
                self.ledger.unsaved[place] = self.ledger.unsaved.get(place, 0) + used
            raise

    async def serve(
        self,
        listener: socket.socket,
        *,
        stop: asyncio.Event | None = None,
        on_ready: Callable[[], None] | None = None,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        """Until SIGTERM or SIGINT, or until `stop` is set. A second signal ends what still runs."""
        stop = stop or asyncio.Event()
        await self.start(listener)
        if on_ready is not None:
            on_ready()
        with _signals(stop, self.server):
            await stop.wait()
            if on_stop is not None:
                on_stop()
            log.info("stopping: %d requests to finish, at most %g s", self.server.num_active, self.config.drain_s)
            await self.stop()


@contextlib.contextmanager
def _signals(stop: asyncio.Event, server: HttpServer) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal() -> None:
        if stop.is_set():
            log.warning("stopping at once")
            server.end_requests()
        stop.set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _fixed_keys(config: GatewayConfig) -> list[Any]:
    return [*(given(secret, admin=False) for secret in config.api_key),
            *(given(secret, admin=True) for secret in config.admin_key)]  # fmt: skip


def _default_limits(config: GatewayConfig) -> Limits:
    return Limits(
        requests_per_minute=config.requests_per_minute,
        tokens_per_minute=config.tokens_per_minute,
        max_concurrent=config.max_concurrent_per_key,
        tokens_per_day=config.tokens_per_day,
    )


def _trail(config: GatewayConfig) -> AuditTrail | None:
    options = from_config(config)
    return None if options is None else AuditTrail(options)


def _pool(config: GatewayConfig, inline: Any, inline_models: tuple[str, ...]) -> Pool:
    if inline is not None:
        # The engine has a queue of its own: nothing waits twice. It is always asked, and says itself if it is not ready.
        row = BackendRow(url="inline:", name="inline", models=inline_models, kind="tonle", max_concurrent=NO_LIMIT)
        return Pool([Backend(row, config, InlineTransport(inline))], probe_interval_s=0)
    if not config.backends:
        raise ConfigError("there is no backend: give one with --backend http://host:8000, or in the file",
                          param="backends")  # fmt: skip
    return Pool([Backend(row, config) for row in config.backends], probe_interval_s=config.probe_interval_s)
