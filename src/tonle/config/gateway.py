"""`GatewayConfig`: every setting of a gateway, as one flat table.

Does: hold defaults and reasons. Does not: read files or variables (`load.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tonle.config import kinds, knobs
from tonle.config.audit import AuditConfig
from tonle.config.kinds import Kind
from tonle.config.knobs import FRONT_DOOR, Knob, knob, knobs_of
from tonle.config.rows import BackendRow, ExperimentRow, ShadowRow, rows, table
from tonle.config.stores import MEMORY, cache_place, state_place
from tonle.errors import ConfigError

_LOOPBACK = ("localhost", "127.", "::1")


def _server(default: Any, kind: Kind, help: str) -> Any:
    return knob("Server", default, kind, help)


def _door(default: Any, kind: Kind, help: str) -> Any:
    return knob(FRONT_DOOR, default, kind, help)


def _state(default: Any, kind: Kind, help: str) -> Any:
    return knob("Keys and counts, of one gateway or several", default, kind, help)


def _limit(kind: Kind, help: str) -> Any:
    return knob("Limits of a key that has none of its own", None, kinds.optional(kind, none="no limit"), help)


def _cache(default: Any, kind: Kind, help: str) -> Any:
    return knob("Response cache", default, kind, help)


def _route(default: Any, kind: Kind, help: str, *, option: str | None = None) -> Any:
    return knob("Backends and routing", default, kind, help, option=option)


def _admission(default: Any, kind: Kind, help: str) -> Any:
    return knob("Admission", default, kind, help)


def _service(default: Any, kind: Kind, help: str) -> Any:
    return knob("Service", default, kind, help)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(AuditConfig):
    """Settings of `tonle gateway`."""

    backends: tuple[BackendRow, ...] = _route(
        (),
        rows(BackendRow, "a list of backends, each with at least a url", short="url"),
        "A server to send requests to. Give it several times; the file can say more about each.",
        option="backend",
    )
    aliases: tuple[tuple[str, str], ...] = _route(
        (), table("public names and the models behind them"), "Names callers may use for models: {public: model}."
    )
    experiments: tuple[ExperimentRow, ...] = _route(
        (), rows(ExperimentRow, "a list of experiments"), "A/B tests and canaries, as YAML."
    )
    shadows: tuple[ShadowRow, ...] = _route((), rows(ShadowRow, "a list of shadows"), "Copies of traffic, as YAML.")
    length_threshold: int = _route(
        5000, kinds.whole(1), "Prompts of at least so many tokens (estimated) go to backends with length: long."
    )
    prefix_affinity: bool = _route(True, kinds.switch(), "Send prompts that begin alike to the same backend.")
    prefill_threshold: int = _route(
        512, kinds.whole(0), "Shorter prompts skip the prefill leg, where backends have roles."
    )
    retries: int = _route(2, kinds.whole(0, 10), "Other backends to try when one fails before its first byte.")
    hedge_after_s: float | None = _route(
        None,
        kinds.optional(kinds.duration(), none="off"),
        "Ask a second backend too when a stream has not begun after this long; the first to begin is kept.",
    )
    backend_timeout_s: float = _route(600.0, kinds.duration(), "Longest wait for a backend's next byte.")
    probe_interval_s: float = _route(5.0, kinds.duration(), "How often backends are asked whether they are well.")
    breaker_failures: int = _route(5, kinds.whole(1), "Failures in a row after which a backend is left alone.")
    breaker_pause_s: float = _route(10.0, kinds.duration(), "For so long.")

    host: str = _server("127.0.0.1", kinds.text(), "Address to listen on; 0.0.0.0 for every network interface.")
    port: int = _server(8080, kinds.whole(0, 65535), "Port to listen on; 0 picks a free one.")
    max_body_bytes: int = _server(8 * 1024**2, kinds.size(), "Largest request body accepted.")
    drain_s: float = _server(
        30.0, kinds.duration(), "How long running requests may still take after SIGTERM or Ctrl-C."
    )
    write_timeout_s: float = _server(60.0, kinds.duration(), "Give up on a client that reads nothing for this long.")
    strict: bool = _server(False, kinds.switch(), "Refuse requests with fields the gateway removes, rather than warn.")
    cors_origins: tuple[str, ...] = _server((), kinds.names(), "Web pages of these origins may call; none by default.")

    api_key: tuple[str, ...] = knobs.api_key()
    trusted_proxies: tuple[str, ...] = knobs.trusted_proxies()
    forwarded_header: str = knobs.forwarded_header()
    admin_key: tuple[str, ...] = _door((), kinds.names(), "The same, for keys that may also manage the gateway.")

    state_db: str | None = _state(
        None,
        kinds.optional(state_place(), none="the file $XDG_STATE_HOME/tonle/gateway.db"),
        "Keys made by `tonle keys` and what they used: a file; or, shared by several gateways, redis://… or postgresql://…",
    )
    state_on_loss: str = _state(
        "refuse",
        kinds.choice("refuse", "serve"),
        "When a shared state_db is out of reach: refuse keys that have limits (503), or serve with limits per gateway.",
    )
    state_lease_s: float = _state(
        30.0, kinds.duration(), "After so long, requests of a gateway that died no longer count as running."
    )
    store_timeout_s: float = _state(
        1.0, kinds.duration(), "Longest wait for Redis or PostgreSQL before it counts as out of reach."
    )

    requests_per_minute: int | None = _limit(kinds.whole(1), "Requests per minute.")
    tokens_per_minute: int | None = _limit(kinds.whole(1), "Tokens per minute, prompt and answer.")
    max_concurrent_per_key: int | None = _limit(kinds.whole(1), "Requests at once.")
    tokens_per_day: int | None = _limit(kinds.whole(1), "Tokens per day (UTC).")

    max_concurrent: int = _admission(48, kinds.whole(1), "Requests a backend works on at once; more wait here.")
    max_queued: int = _admission(512, kinds.whole(0), "Requests that may wait for one backend; more get 429.")
    max_queued_tokens: int = _admission(2_000_000, kinds.whole(1), "Tokens that may wait for one backend.")
    keep_alive_s: float = _admission(15.0, kinds.duration(), "Waiting streams get a comment this often; 0 = off.")

    cache: str | None = _cache(
        MEMORY, cache_place(), "Answer repeated deterministic requests from here: memory, redis://… or off."
    )
    cache_max_size: int | None = _cache(
        None, kinds.optional(kinds.whole(1), none="1000"), "Most answers kept in memory."
    )
    cache_ttl_s: float = _cache(3600.0, kinds.duration(), "How long.")
    cache_max_bytes: int | None = _cache(
        None, kinds.optional(kinds.size(), none="64MiB"), "Most memory for them. Redis has limits of its own."
    )

    sla_p95_s: float = _service(2.0, kinds.duration(), "The promise /health compares the slowest twentieth with.")
    context_window: int | None = _service(
        10, kinds.optional(kinds.whole(1), none="all"), "Messages of a conversation /api/v1/inference sends on."
    )
    max_context_length: int | None = _service(
        2048, kinds.optional(kinds.whole(16), none="no limit"), "Tokens (estimated) of them; older ones are left out."
    )

    log_level: str = knob(
        "Logging", "INFO", kinds.choice("DEBUG", "INFO", "WARNING", "ERROR"), "Least severity that is logged."
    )
    log_json: bool = knob("Logging", False, kinds.switch(), "Log JSON lines rather than lines for people.")

    def validate(self) -> None:
        """What no single setting can see. Raises `ConfigError`."""
        names = [backend_name(row) for row in self.backends]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two backends are called {name}; give them names", param="backends")
        for row, name in zip(self.backends, names, strict=True):
            if row.kind == "auto" and not self.probe_interval_s:
                raise ConfigError(f"backend {name}: what kind of server it is can only be told by asking it, and "
                                  "probe_interval is 0; set its kind to tonle, vllm or openai",
                                  param="backends")  # fmt: skip
        roles = {row.role for row in self.backends}
        if "prefill" in roles and not roles & {"decode", "any"}:
            raise ConfigError("there are prefill backends but none that decodes", param="backends")
        for experiment in self.experiments:
            if not sum(arm.weight for arm in experiment.arms):
                raise ConfigError(f"experiment {experiment.name}: all weights are 0", param="experiments")
            for arm in experiment.arms:
                if arm.backend is not None and arm.backend not in names:
                    raise ConfigError(f"arm {arm.name} wants backend {arm.backend}, which is not there",
                                      param="experiments")  # fmt: skip
        for knob_name, limit in (("cache_max_size", self.cache_max_size), ("cache_max", self.cache_max_bytes)):
            if limit is not None and self.cache not in (None, MEMORY):
                raise ConfigError(f"{knob_name} has no effect on a cache in Redis; remove it, and set maxmemory and an "
                                  "eviction policy (maxmemory-policy volatile-lru) in that Redis instead",
                                  param=knob_name)  # fmt: skip
        for knob_name, value in (("state_lease", self.state_lease_s), ("store_timeout", self.store_timeout_s)):
            if value <= 0:
                raise ConfigError(f"{knob_name} must be more than 0", param=knob_name)

    @property
    def loopback(self) -> bool:
        """Only programs of this machine can reach the address."""
        return self.host.startswith(_LOOPBACK)


def backend_name(row: BackendRow) -> str:
    return row.name or urlsplit(row.url).netloc or row.url


def default_state_db() -> Path:
    import os

    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "tonle" / "gateway.db"


KNOBS: dict[str, Knob] = knobs_of(GatewayConfig)
