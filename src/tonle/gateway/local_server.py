"""`LocalServer`: what `tonle serve` and `tonle worker` give their gateway in place of backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tonle.gateway.backends.transport import Transport
from tonle.gateway.local_workers import LocalWorkers
from tonle.gateway.sleep_pages import Sleeper
from tonle.protocol.media_paths import is_media
from tonle.protocol.replies import ModelEntry
from tonle.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    """An engine, or worker pools, or both, in this process that take the place of backends."""

    transport: Transport
    models: Callable[[], dict[str, ModelEntry]]  # the names it answers to, which change as adapters come and go
    metrics: Metrics | None  # of the engine; None: there is none
    context_length: Callable[[], int | None]  # of its model, tokens; None until that is loaded
    on_drain: Callable[[], None]  # told when the server takes nothing new
    trust_salt: bool = False  # a caller's X-Tonle-Salt says who shares cached prefixes and answers
    trust_router: bool = False  # kv_transfer_params of requests are the caller's, a router's, to set
    enable_lora: bool = False  # without keys, every caller may load and remove adapters
    request_of: Callable[[int], str | None] | None = None  # the id of the request that an engine's handle belongs to
    sleeper: Sleeper | None = None  # puts its engine to sleep; None: this process cannot
    workers: LocalWorkers | None = None  # the pools behind `transport`
    salt_secret: str | None = None  # behind the salts of cached prefixes; None: drawn at the start, or of the state

    @property
    def shares_port(self) -> bool:
        """Other processes have connections of the same server."""
        return self.metrics is not None and self.metrics.shared

    @property
    def media_paths(self) -> tuple[str, ...]:
        """Those of its worker pools."""
        return () if self.workers is None else tuple(path for path in self.workers.by_path if is_media(path))
