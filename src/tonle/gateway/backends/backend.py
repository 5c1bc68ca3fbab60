"""`Backend`: one server that requests may be sent to, and what is known about it.

Does: hold its state (health, draining, models, queue, breaker), send one request. Does not: choose, retry or probe.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tonle.config.gateway import GatewayConfig, backend_name
from tonle.config.routing import BackendConfig
from tonle.edge.client import Address, HttpClient, Sink
from tonle.errors import ConfigError
from tonle.gateway.admission import Gate
from tonle.gateway.backends.breaker import Breaker
from tonle.gateway.backends.transport import HttpTransport, Transport
from tonle.protocol.replies import ModelEntry

NOT_PROBED = "not probed yet"


class Backend:
    def __init__(
        self,
        row: BackendConfig,
        config: GatewayConfig,
        transport: Transport | None = None,
        list_models: Callable[[], dict[str, ModelEntry]] | None = None,
    ) -> None:
        """`list_models`: of a server in this process, which is asked each time; others are probed."""
        self.row = row
        self.name = backend_name(row)
        self.transport = transport or _http(row)
        self.local = transport is not None  # in this process: it tells what it answers
        self.price_per_hour = config.price_per_hour if row.price_per_hour is None else row.price_per_hour
        self.timeout_s = row.timeout_s or config.backend_timeout_s
        self._list_models = list_models
        self._models = {name: ModelEntry(id=name) for name in row.models}
        self.kind = row.kind  # auto until the first probe has found out
        self.unhealthy_reason: str | None = None if row.models else NOT_PROBED  # None: it is healthy
        self.warning: str | None = None  # what its operator should know though it is healthy
        self.draining = False  # set by an admin: finish what runs, take nothing new
        self.gate = Gate(
            max_concurrent=row.max_concurrent or config.max_concurrent,
            max_queued=config.max_queued if row.max_queued is None else row.max_queued,
            max_queued_tokens=config.max_queued_tokens,
        )
        self.breaker = Breaker(max_failures=config.breaker_failures, pause_s=config.breaker_pause_s)
        self.num_probes = 0  # begun
        self.last_probe = 0  # the number of the one that `models` are from
        self.num_sent = 0
        self.num_failed = 0

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
        return self.is_up and not self.draining and self.breaker.allows

    @property
    def load(self) -> float:
        """Requests it has or will get from this gateway, by its weight."""
        return (self.gate.num_inside + self.gate.num_queued) / self.row.weight

    async def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str], sink: Sink, *, first_s: float
    ) -> None:
        """Raises `UpstreamError`."""
        await self.transport.send(method, path, body, headers, sink, first_s=first_s, silence_s=self.timeout_s)


def _http(row: BackendConfig) -> HttpTransport:
    api_key = row.api_key
    if row.api_key_env is not None:
        api_key = os.environ.get(row.api_key_env)
        if not api_key:
            raise ConfigError(f"backend {row.url}: the variable {row.api_key_env} is not set", param="api_key_env")
    return HttpTransport(HttpClient(Address.parse(row.url), api_key=api_key))
