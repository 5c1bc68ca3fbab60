"""`GatewayConfig`: the settings of a gateway, on top of those it shares with `tonle serve` (`server.py`).

Does: hold defaults and help, check settings against each other. Does not: read files or variables (`load.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tonle.config import values
from tonle.config.discovery import DiscoveryConfig, discovery_sources
from tonle.config.fallbacks import fallback_chains, fallback_table
from tonle.config.routing import NAME_PATTERN, BackendConfig, ExperimentConfig, ShadowConfig, mapping, objects
from tonle.config.server import ServerConfig, cache_by_default_setting, port_setting
from tonle.config.setting import QUEUE, ROUTING, STATE, Setting, setting, settings_of
from tonle.config.state_dir import state_dir
from tonle.config.values import ValueType
from tonle.errors import ConfigError


def _route(default: Any, type: ValueType, help: str, *, option: str | None = None) -> Any:
    return setting(ROUTING, default, type, help, option=option)


def _state(default: Any, type: ValueType, help: str) -> Any:
    return setting(STATE, default, type, help)


def _queue(default: Any, type: ValueType, help: str) -> Any:
    return setting(QUEUE, default, type, help)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServerConfig):
    """Settings of `tonle gateway`."""

    backends: tuple[BackendConfig, ...] = _route(
        (),
        objects(BackendConfig, "a list of backends, each with at least a url", short="url"),
        "Server to send requests to. Repeat the flag for more; in a file each can have settings of its own.",
        option="backend",
    )
    discovery: tuple[DiscoveryConfig, ...] = _route(
        (),
        discovery_sources(),
        "Where to look for backends that come and go: kubernetes:NAMESPACE/SERVICE:PORT, file:PATH, http://HOST:PORT/PATH, or "
        "YAML. Repeatable.",
    )
    backend_drain_s: float = _route(
        300.0, values.duration(), "How long requests may run on at a backend that was removed; then they are ended."
    )
    region: str | None = _route(
        None,
        values.optional(values.pattern(NAME_PATTERN, "a name such as eu-west"), none="none"),
        "Where this gateway is. Backends of its own region come first, and those that name none are in it.",
    )
    region_order: tuple[str, ...] = _route(
        (),
        values.names(),
        "Other regions, nearest first; those not named come last. Used when its own has no backend with room.",
    )
    gateway_id: str | None = _route(
        None,
        values.optional(values.pattern(r"[A-Za-z0-9._:-]{1,64}", "a name such as eu-1"), none="drawn"),
        "Its name in X-Tonle-Via, by which gateways that are each other's backends avoid loops. Replicas of one gateway need the "
        "same; those with a shared state_db and one region have it by default.",
    )
    fallbacks: tuple[tuple[str, tuple[str, ...]], ...] = _route(
        (), fallback_table(), "Models that answer when all backends of another are out: {large: [medium, small]}."
    )
    aliases: tuple[tuple[str, str], ...] = _route(
        (),
        mapping("public names and the models behind them"),
        "Other names callers may use for models: {public: model}.",
    )
    experiments: tuple[ExperimentConfig, ...] = _route(
        (), objects(ExperimentConfig, "a list of experiments"), "A/B tests and canaries, as YAML."
    )
    shadows: tuple[ShadowConfig, ...] = _route(
        (), objects(ShadowConfig, "a list of shadows"), "Send a copy of some requests to another model, as YAML."
    )
    length_threshold: int = _route(
        5000, values.tokens(1), "Prompts of at least this many tokens (estimated) go to backends with length: long."
    )
    prefix_affinity: bool = _route(
        True, values.boolean(), "Send prompts that begin alike to the same backend, which has cached their beginning."
    )
    prefill_threshold: int = _route(
        512, values.tokens(0), "With prefill and decode backends: shorter prompts skip the prefill backend."
    )
    retries: int = _route(
        2,
        values.integer(0, 10),
        "How many other backends to try when one cannot be reached or has no room; at most one when it failed on the "
        "request, none when it timed out.",
    )
    hedge_after_s: float | None = _route(
        None,
        values.optional(values.duration(), none="off"),
        "Ask a second backend as well when a stream has not begun after this long, and keep the one that begins first.",
    )
    backend_timeout_s: float = _route(
        600.0, values.duration(), "Longest wait for a backend's next byte; then the caller gets 504."
    )
    probe_interval_s: float = _route(5.0, values.duration(), "Time between health checks of a backend; 0 = none.")
    breaker_failures: int = _route(
        5, values.integer(1), "Consecutive failures after which a backend gets no traffic for a while."
    )
    breaker_pause_s: float = _route(10.0, values.duration(), "How long such a backend gets no traffic.")

    port: int = port_setting(8080)

    state_on_loss: str = _state(
        "refuse",
        values.choice("refuse", "serve"),
        "When a shared state_db cannot be reached: refuse keys that have limits (503), or serve them and count limits per "
        "gateway.",
    )
    state_lease_s: float = _state(
        30.0, values.duration(), "How long requests of a gateway that died still count as running."
    )
    store_timeout_s: float = _state(
        1.0, values.duration(), "Longest wait for Redis or PostgreSQL before it counts as unreachable."
    )

    max_concurrent: int = _queue(48, values.integer(1), "Concurrent requests per backend; more wait in the queue.")
    max_queued: int = _queue(512, values.integer(0), "Requests that may wait for one backend; more get 429.")
    max_queued_tokens: int = _queue(2_000_000, values.tokens(1), "Tokens that may wait for one backend; more get 429.")
    keep_alive_s: float = _queue(
        15.0,
        values.duration(),
        "Time between comments sent to waiting streams, so that proxies keep them open; 0 = none.",
    )

    cache_by_default: bool = cache_by_default_setting(True)

    def validate(self) -> None:
        """Check settings against each other. Raises `ConfigError`."""
        self.check_tls()
        self.check_origins()
        self.check_requests()
        self.check_observed()
        names = [backend_name(backend) for backend in self.backends]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two backends are called {name}; give each a name of its own", param="backends")
        for backend in self.backends:
            check_backend(backend, self)
        roles = {backend.role for backend in self.backends}
        if "prefill" in roles and not roles & {"decode", "any"} and not self.discovery:
            raise ConfigError(
                "there are backends with role: prefill, but none with role: decode or any", param="backends"
            )
        for experiment in self.experiments:
            if not sum(arm.weight for arm in experiment.arms):
                raise ConfigError(f"experiment {experiment.name}: all weights are 0", param="experiments")
            for arm in experiment.arms:
                if arm.backend is not None and arm.backend not in names and not self.discovery:
                    raise ConfigError(f"arm {arm.name} of experiment {experiment.name} names backend {arm.backend}, but "
                                      f"there is none of that name; there are: {', '.join(names) or 'none'}",
                                      param="experiments")  # fmt: skip
        fallback_chains(dict(self.fallbacks), dict(self.aliases))
        if self.region_order and self.region is None:
            raise ConfigError("region_order has no effect without region: say where this gateway is", param="region")
        self.check_cache()
        self.check_responses()
        for name, value in (("state_lease", self.state_lease_s), ("store_timeout", self.store_timeout_s)):
            if value <= 0:
                raise ConfigError(f"{name} must be more than 0", param=name)


def check_backend(backend: BackendConfig, config: GatewayConfig) -> None:
    """Against the gateway's settings, whenever it comes. Raises `ConfigError`."""
    if backend.kind == "auto" and not config.probe_interval_s:
        raise ConfigError(f"backend {backend_name(backend)}: with probe_interval 0 the gateway cannot find out what kind of "
                          "server it is; set its kind to tonle, vllm or openai",
                          param="backends")  # fmt: skip


def backend_name(backend: BackendConfig) -> str:
    """Also of one whose URL cannot be used, for the message that says so; never with a password."""
    if backend.name:
        return backend.name
    try:
        place = urlsplit(backend.url).netloc
    except ValueError:
        place = ""
    return (place or backend.url).rpartition("@")[2]


def default_state_db() -> Path:
    return state_dir() / "gateway.db"


SETTINGS: dict[str, Setting] = settings_of(GatewayConfig)
