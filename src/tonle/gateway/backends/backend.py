"""`Backend`: one server that requests may be sent to, and what is known about it.

Does: hold its state (health, draining, models, queue, breaker), send one request, end those of a backend that is removed. Does
not: choose, retry or probe.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from tonle.config.gateway import GatewayConfig, backend_name
from tonle.config.routing import BackendConfig
from tonle.edge.client import Address, HttpClient, Sink, UpstreamError
from tonle.errors import ConfigError
from tonle.gateway.admission import Gate
from tonle.gateway.backends.breaker import Breaker
from tonle.gateway.backends.transport import HttpTransport, Transport
from tonle.protocol.replies import ModelEntry

NOT_PROBED = "not probed yet"
SETTINGS = "settings"  # the source of backends that the gateway was started with
LEFT = "backend removed"  # the kind of `UpstreamError` of a request that must be sent to another


class Backend:
    def __init__(
        self,
        row: BackendConfig,
        config: GatewayConfig,
        transport: Transport | None = None,
        list_models: Callable[[], dict[str, ModelEntry]] | None = None,
        *,
        source: str = SETTINGS,
    ) -> None:
        """`list_models`: of a server in this process, which is asked each time; others are probed. `source`: who wants it."""
        self.row = row
        self.name = backend_name(row)
        self.source = source
        self.transport = transport or http_transport(row)
        self.local = transport is not None  # in this process: it tells what it answers
        self._list_models = list_models
        self._models = {name: ModelEntry(id=name) for name in row.models}
        self.kind = row.kind  # auto until the first probe has found out
        self.unhealthy_reason: str | None = None if row.models else NOT_PROBED  # None: it is healthy
        self.warning: str | None = None  # what its operator should know though it is healthy
        self.owed_share = 0.0  # of a request, that it is due by `row.share`
        self.draining = False  # set by an admin: finish what runs, take nothing new
        self.leaving = False  # it was removed: what it was given may finish there, for a while
        self.gone = False  # that while is over
        self.gate = Gate(max_concurrent=1, max_queued=0, max_queued_tokens=config.max_queued_tokens)
        self._under_way: set[asyncio.Timeout] = set()
        self.change(row, config)
        self.breaker = Breaker(max_failures=config.breaker_failures, pause_s=config.breaker_pause_s)
        self.gateway_id: str | None = None  # of a gateway, as it tells when it is probed: its name in X-Tonle-Via
        self.num_probes = 0  # begun
        self.last_probe = 0  # the number of the one that `models` are from
        self.num_sent = 0
        self.num_failed = 0

    def change(self, row: BackendConfig, config: GatewayConfig) -> None:
        """Another weight, role, region, price, or other limits. Where it is, and what it is asked with, stay."""
        self.row = row
        self.price_per_hour = config.price_per_hour if row.price_per_hour is None else row.price_per_hour
        self.timeout_s = row.timeout_s or config.backend_timeout_s
        self.region = row.region or config.region
        self.gate.resize(
            max_concurrent=row.max_concurrent or config.max_concurrent,
            max_queued=config.max_queued if row.max_queued is None else row.max_queued,
        )

    @property
    def models(self) -> dict[str, ModelEntry]:
        """By name; adapters too. It is replaced, never changed."""
        return self._models if self._list_models is None else self._list_models()

    @models.setter
    def models(self, models: dict[str, ModelEntry]) -> None:
        self._models = models

    @property
    def is_up(self) -> bool:
        """It runs, whether or not it gets requests."""
        return self.unhealthy_reason is None

    @property
    def available(self) -> bool:
        return self.is_up and not self.draining and not self.leaving and self.breaker.allows

    @property
    def is_idle(self) -> bool:
        return not (self._under_way or self.gate.num_inside or self.gate.num_queued)

    @property
    def load(self) -> float:
        """Requests it has or will get from this gateway, by its weight."""
        return (self.gate.num_inside + self.gate.num_queued) / self.row.weight

    async def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str], sink: Sink, *, first_s: float
    ) -> None:
        """Raises `UpstreamError`."""
        if self.local:
            await self.transport.send(method, path, body, headers, sink, first_s=first_s, silence_s=self.timeout_s)
            return
        if self.gone:
            raise UpstreamError(LEFT, self.name, sent=False)
        ending = asyncio.timeout(None)
        self._under_way.add(ending)
        try:
            async with ending:
                await self.transport.send(method, path, body, headers, sink, first_s=first_s, silence_s=self.timeout_s)
        except TimeoutError:
            if not ending.expired():
                raise
            raise UpstreamError(LEFT, f"{self.name}, before its answer was complete") from None
        finally:
            self._under_way.discard(ending)

    def leave(self) -> None:
        """It gets nothing new. Requests that wait for it are told to look for another."""
        self.leaving = True
        self.gate.displace_all(lambda: UpstreamError(LEFT, self.name, sent=False))

    def end(self) -> None:
        """What still runs there is ended. Nothing can be sent to it any more."""
        self.leaving = self.gone = True
        self.gate.displace_all(lambda: UpstreamError(LEFT, self.name, sent=False))
        for ending in tuple(self._under_way):
            ending.reschedule(asyncio.get_running_loop().time())
        self.transport.close()


def http_transport(row: BackendConfig) -> HttpTransport:
    """Nothing is connected yet. Raises `ConfigError` if its URL or its key cannot be used."""
    api_key = row.api_key
    if row.api_key_env is not None:
        api_key = os.environ.get(row.api_key_env)
        if not api_key:
            raise ConfigError(f"backend {row.url}: the variable {row.api_key_env} is not set", param="api_key_env")
    return HttpTransport(HttpClient(Address.parse(row.url), api_key=api_key))
