"""`Gateway`: the server and its stages put together from settings, and their life from start to end.

Does: build, start, serve, drain, stop; in front of other servers, or of an engine in this process (`LocalServer`).
Does not: take part in a request (`pipeline.py`) or bind addresses.
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
from typing import Any

from prometheus_client import CollectorRegistry

from tonle.audit.audit_metrics import AuditMetrics
from tonle.audit.audit_options import from_config
from tonle.audit.audit_stats import Alarm
from tonle.audit.trail import AuditTrail
from tonle.cache import Cache, ResponseCache
from tonle.cache.redis_client import RedisClient
from tonle.cache.response_cache import MAX_BYTES, MAX_SIZE
from tonle.config.gateway import GatewayConfig, default_state_db
from tonle.config.routing import BackendConfig
from tonle.config.stores import MEMORY
from tonle.edge.interpreter import freeze_objects
from tonle.edge.listening import most_connections, tls_context
from tonle.edge.server import HttpServer, ServerLimits
from tonle.errors import ConfigError, StoreLost
from tonle.gateway.adapters import AdapterAdmin
from tonle.gateway.admin import Admin
from tonle.gateway.alert_sources import AlertSources
from tonle.gateway.api_keys.key import ANONYMOUS_CALLER, LOCAL_CALLER, KeyLimits, given
from tonle.gateway.api_keys.ring import KeyRing
from tonle.gateway.apis.responses.api import ResponsesApi
from tonle.gateway.apis.responses.build import shared_resources
from tonle.gateway.auth import Auth
from tonle.gateway.backend_admin import BackendAdmin
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.build_observed import build_alerts, build_observed
from tonle.gateway.cached_reply import CachedReplies
from tonle.gateway.dashboard.sessions import Sessions
from tonle.gateway.discovery.added_backends import AddedBackends
from tonle.gateway.discovery.discovery import Discovery
from tonle.gateway.discovery.fleet import Fleet
from tonle.gateway.discovery.source import Source
from tonle.gateway.discovery.sources import source_of
from tonle.gateway.experiments import Experiments
from tonle.gateway.gateway_metrics import GatewayMetrics
from tonle.gateway.hops import VIA_HEADER
from tonle.gateway.limits.media_limiter import MediaLimiter
from tonle.gateway.limits.memory_limiter import MemoryLimiter
from tonle.gateway.limits.shared_limiter import SharedLimiter, SharedMetrics
from tonle.gateway.limits.usage_saver import UsageSaver
from tonle.gateway.local_server import LocalServer
from tonle.gateway.observing import Observer
from tonle.gateway.pipeline import Pipeline, PipelineOptions, Stages
from tonle.gateway.proxies import Proxies
from tonle.gateway.recording import Recorder
from tonle.gateway.routes import Routes
from tonle.gateway.routing.held_blocks import HeldBlocks
from tonle.gateway.routing.router import Router
from tonle.gateway.sending import Sender, SendOptions
from tonle.gateway.services import Services
from tonle.gateway.shadow import Shadows
from tonle.gateway.state_store import StateStore, state_of
from tonle.gateway.under_way import UnderWay
from tonle.observe.alert_metrics import AlertMetrics
from tonle.observe.sla import Sla
from tonle.observe.tracing import GATEWAY_SERVICE, SERVE_SERVICE, Tracing
from tonle.protocol.media_paths import MEDIA_PATHS
from tonle.telemetry import shutdown_messages

log = logging.getLogger("tonle.gateway")

NO_LIMIT = 1 << 40


class Gateway:
    """Build it on the thread it will run on."""

    def __init__(self, config: GatewayConfig, *, local: LocalServer | None = None) -> None:
        """Raises `ConfigError`."""
        self.config = config
        self._local = local
        self._tls = tls_context(config)
        self._state = _state(config, is_local=local is not None)
        self.ring = KeyRing(_fixed_keys(config), self._state.keys if self._state is not None else None)
        self.trail = _trail(config, lambda alarm: self._alert_sources.on_alarm(alarm))
        self.limiter, self._counter = _counting(config, self._state)
        shared = self.limiter if isinstance(self.limiter, SharedLimiter) else None
        self.pool = _pool(config, local)
        fleet = Fleet(self.pool, config)
        self._discovery, added = _discovery(config, fleet, None if local is not None else self._state)
        self._held = HeldBlocks({each.name: each.row.kv_events for each in self.pool.backends if each.row.kv_events})
        workers = None if local is None else local.workers
        router = Router(self.pool, config, self._held, None if workers is None else workers.default_model)
        self._cache = _cache(config)
        replay = CachedReplies(self._cache, by_default=config.cache_by_default)
        sessions = Sessions(self.ring)
        anonymous = LOCAL_CALLER if local is None else ANONYMOUS_CALLER
        auth = Auth(self.ring, sessions=sessions, anonymous=anonymous, anywhere=local is not None)
        recorder = Recorder(self.trail)
        self.shadows = Shadows(config.shadows, self.pool, recorder)
        self.sla = Sla(config.sla_p95_s, ttft_p95_s=config.sla_ttft_p95_s, itl_p95_s=config.sla_itl_p95_s)
        local_metrics, sleeper = (None, None) if local is None else (local.metrics, local.sleeper)
        metrics = GatewayMetrics(self.sla, self.pool.backends, replay.cache, process=local_metrics is None)
        self.alerts = build_alerts(config)
        self._alert_sources = AlertSources(self.alerts, self.sla, self.pool.backends, sleeper=sleeper)
        self._register(metrics.registry, shared)
        self.observed, self._scraper = build_observed(config, self.pool.backends, local_metrics, self.sla, self.alerts)
        figures = None if self.observed is None else self.observed.backend_figures
        under_way = UnderWay()
        self._tracing = Tracing.of(config, GATEWAY_SERVICE if local is None else SERVE_SERVICE)
        stages = Stages(
            limiter=self.limiter, media_limiter=MediaLimiter(_default_limits(config)), recorder=recorder, replay=replay,
            router=router,
            sender=Sender(router.choose, SendOptions(retries=config.retries, hedge_after_s=config.hedge_after_s)),
            shadows=self.shadows, metrics=metrics, under_way=under_way,
            observer=Observer(self.observed, self.pool.find, self._tracing),
        )  # fmt: skip
        options = _pipeline_options(config, local)
        self._pipeline = Pipeline(stages, options, salt_secret=(local and local.salt_secret) or secrets.token_hex(32))
        self._responses = shared_resources(
            config, router, lambda: self.server, own_length=None if local is None else local.context_length
        )
        self.routes = Routes(Services(
            config=config, auth=auth, ring=self.ring, sessions=sessions, trail=self.trail, pipeline=self._pipeline,
            router=router, pool=self.pool, replay=replay,
            metrics=metrics, admin=Admin(self.ring, self.limiter), shared=shared,
            backend_admin=BackendAdmin(self.pool, fleet, self._discovery, added, figures),
            adapters=AdapterAdmin(self.pool, under_way, dict(config.aliases), strict=config.strict),
            experiments=Experiments(config.experiments, router, self.trail),
            responses=ResponsesApi(self._responses, trust_salt=options.trust_salt),
            proxies=Proxies(config.trusted_proxies, config.forwarded_header), is_open=lambda: not self.server.draining,
            is_local=local is not None, local_metrics=local_metrics,
            media_paths=MEDIA_PATHS if local is None else local.media_paths,
            enable_lora=local is not None and local.enable_lora, observed=self.observed,
            trust_salt=options.trust_salt, request_of=None if local is None else local.request_of,
            sleeper=sleeper,
        ))  # fmt: skip
        self.server = HttpServer(self.routes, _limits(config), check_head=self.routes.check_head)

    def _register(self, registry: CollectorRegistry, shared: SharedLimiter | None) -> None:
        """What is exported besides the metrics of requests."""
        registry.register(AlertMetrics(self.alerts))
        registry.register(self.shadows.requests)
        local = self._local
        parts = () if local is None else (local.metrics, None if local.workers is None else local.workers.metrics)
        for part in parts:
            if part is not None:
                registry.register(part)
        if self.trail is not None:
            registry.register(AuditMetrics(self.trail))
        if shared is not None:
            registry.register(SharedMetrics(shared))

    @property
    def place(self) -> str:
        """Where keys are kept and limits counted; without passwords."""
        return self._state.keys.place if self._state is not None else "memory"

    def _check_exposure(self) -> None:
        """Without keys only this machine may call a gateway; a server of one model is what its host setting says."""
        if not self.ring.empty or self._local is not None:
            return
        if not self.config.loopback:
            raise ConfigError(
                f"there is no API key, so {self.config.host} would be open to anyone who can reach it: create one with "
                "`tonle keys create --name NAME` or give --api-key, or listen on 127.0.0.1",
                param="host",
            )
        log.warning("no API key is configured: every program of this machine may call, and manage, this gateway")

    async def start(self, listener: socket.socket) -> None:
        """Raises `ConfigError` if keys cannot be read, or if a server that other machines can reach has none."""
        if self._state is not None:
            await self._open(self._state)
        self.pool.probe_headers = {VIA_HEADER: self._pipeline.hops.name}
        self._check_exposure()
        if self._local is None or not self._local.shares_port:
            self.alerts.source = f"{socket.gethostname()}:{listener.getsockname()[1]}"
            await self._alert_sources.start()
        if self.trail is not None:
            await asyncio.to_thread(self.trail.start)
        if self._counter is not None:
            await self._counter.start()
        self.ring.start()
        self._held.start()
        await self.pool.start()
        if self._discovery is not None:
            await self._discovery.start()
            await self.pool.settle()
        await self._start_observing()
        await self.server.start(listener, tls=self._tls)

    async def stop(self, *, drain_s: float | None = None) -> None:
        """Running requests may finish for a while; whatever happens to them is on record when this returns."""
        self.routes.dashboard.stop()
        await self.server.stop(drain_s=self.config.drain_s if drain_s is None else drain_s)
        if self._discovery is not None:
            await self._discovery.stop()
        await self._alert_sources.stop()
        if self._local is not None:
            self._local.on_drain()  # not before: requests that were on their way are answered, too
        await self.shadows.stop()
        if self._scraper is not None:
            await self._scraper.stop()
        if self.observed is not None:
            await self.observed.stop()
        await self.pool.stop()
        await asyncio.to_thread(self._held.close)
        if self.trail is not None:
            await asyncio.to_thread(self.trail.close)
        if self._counter is not None:
            await self._counter.stop()
        self.ring.stop()
        if self._cache is not None:
            await self._cache.close()
        if self._responses.store is not None:
            await self._responses.store.close()
        if self._state is not None:
            await self._state.close()
        if self._tracing is not None:
            await self._tracing.stop()  # last: it may wait for a collector

    async def _start_observing(self) -> None:
        if self._tracing is not None:
            await self._tracing.start()
        if self.observed is not None:
            await self.observed.start()
        if self._scraper is not None:
            self._scraper.start()

    async def _open(self, state: StateStore) -> None:
        await state.open()
        try:
            await self.ring.reload()
            self._pipeline.salt_secret = await state.keys.secret("salt")
            if state.counts is not None and self.config.gateway_id is None:
                self._pipeline.hops.share(await state.keys.secret("gateway"), self.config.region)
            if not self.pool.backends and not self.config.discovery and not await state.backends.all_backends():
                raise ConfigError("there is no backend: give one with --backend http://host:8000, or in the file",
                                  param="backends")  # fmt: skip
        except StoreLost as error:
            raise ConfigError(f"cannot use state_db: {error}", param="state_db") from error

    async def serve(
        self,
        listener: socket.socket,
        *,
        stop: asyncio.Event | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> int:
        """Until SIGTERM or SIGINT, or until `stop` is set. A second signal ends what still runs. Requests cut off."""
        stop = stop or asyncio.Event()
        await self.start(listener)
        freeze_objects()
        if on_ready is not None:
            on_ready()
        with _signals(stop, self.server) as asked:
            await stop.wait()
            if asked.is_set() or self.server.num_active:  # else the reason to stop is told elsewhere
                shutdown_messages.say_stopping(self.server.num_active, self.config.drain_s)
            reminder = asyncio.create_task(
                shutdown_messages.remind(lambda: self.server.num_active, self.config.drain_s)
            )
            try:
                await self.stop()
            finally:
                reminder.cancel()
        return self.server.num_cut


@contextlib.contextmanager
def _signals(stop: asyncio.Event, server: HttpServer) -> Iterator[asyncio.Event]:
    """The event is set once a signal has come."""
    asked = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def on_signal() -> None:
        asked.set()
        if stop.is_set():
            log.warning("stopping at once")
            server.end_requests()
        stop.set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield asked
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _pipeline_options(config: GatewayConfig, local: LocalServer | None) -> PipelineOptions:
    return PipelineOptions(
        keep_alive_s=config.keep_alive_s, strict=config.strict, gateway_id=config.gateway_id, is_local=local is not None,
        trust_salt=local is not None and local.trust_salt, trust_router=local is not None and local.trust_router,
    )  # fmt: skip


def _fixed_keys(config: GatewayConfig) -> list[Any]:
    return [*(given(secret, admin=False) for secret in config.api_key),
            *(given(secret, admin=True) for secret in config.admin_key)]  # fmt: skip


def _limits(config: GatewayConfig) -> ServerLimits:
    return ServerLimits(
        max_body_bytes=config.max_body_bytes, request_memory_bytes=config.request_memory_bytes,
        max_connections=most_connections(config.max_connections), write_timeout_s=config.write_timeout_s,
    )  # fmt: skip


def _default_limits(config: GatewayConfig) -> KeyLimits:
    return KeyLimits(
        requests_per_minute=config.requests_per_minute,
        tokens_per_minute=config.tokens_per_minute,
        max_concurrent=config.max_concurrent_per_key,
        tokens_per_day=config.tokens_per_day,
        audio_seconds_per_minute=config.audio_seconds_per_minute,
        images_per_minute=config.images_per_minute,
    )


def _state(config: GatewayConfig, *, is_local: bool) -> StateStore | None:
    """A server of one model keeps keys only where an operator can make some; else those of its settings are all."""
    if is_local and config.state_db is None and not config.admin_key:
        return None
    return state_of(config.state_db or str(default_state_db()), timeout_s=config.store_timeout_s)


def _counting(
    config: GatewayConfig, state: StateStore | None
) -> tuple[MemoryLimiter | SharedLimiter, UsageSaver | SharedLimiter | None]:
    """Who counts, and what must be started and stopped for that."""
    default = _default_limits(config)
    if state is not None and state.counts is not None:
        serve = config.state_on_loss == "serve"
        shared = SharedLimiter(state.counts, default, lease_s=config.state_lease_s, serve_when_lost=serve)
        return shared, shared
    limiter = MemoryLimiter(default)
    return limiter, None if state is None or state.usage is None else UsageSaver(limiter, state.usage)


def _cache(config: GatewayConfig) -> Cache | None:
    if config.cache is None:
        return None
    if config.cache == MEMORY:
        max_size, max_bytes = config.cache_max_size or MAX_SIZE, config.cache_max_bytes or MAX_BYTES
        return ResponseCache(max_size, config.cache_ttl_s, max_bytes=max_bytes)
    client = RedisClient(config.cache, timeout_s=config.store_timeout_s, param="cache")
    from tonle.cache.redis_cache import RedisCache

    return RedisCache(client, config.cache_ttl_s)


def _trail(config: GatewayConfig, on_alarm: Callable[[Alarm], None]) -> AuditTrail | None:
    options = from_config(config)
    return None if options is None else AuditTrail(options, own_process=True, on_alarm=on_alarm)


def _discovery(
    config: GatewayConfig, fleet: Fleet, state: StateStore | None
) -> tuple[Discovery | None, AddedBackends | None]:
    """What looks for backends, and those that admins add; neither where the engine of this process is the only one."""
    if state is None:
        return None, None
    added = AddedBackends(fleet, state.backends, shared=state.counts is not None)
    sources: list[Source] = [added, *(source_of(wanted) for wanted in config.discovery)]
    return Discovery(sources, fleet.reconcile), added


def _pool(config: GatewayConfig, local: LocalServer | None) -> BackendPool:
    if local is not None:
        # The engine has a queue of its own: nothing waits twice. It is always asked, and says itself if it is not ready.
        names = tuple(local.models())
        row = BackendConfig(url="local:", name="local", models=names, kind="tonle", max_concurrent=NO_LIMIT)
        return BackendPool([Backend(row, config, local.transport, local.models)], probe_interval_s=0)
    return BackendPool([Backend(row, config) for row in config.backends], probe_interval_s=config.probe_interval_s)
