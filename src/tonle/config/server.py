"""`ServerConfig`: the settings that `tonle serve` and `tonle gateway` share, declared once.

Does: hold them, check the TLS files. Does not: act on them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonle.config import values
from tonle.config.observe import MAX_PRICE, ObserveConfig
from tonle.config.setting import CACHE, INFERENCE, LIMITS, LOGGING, SECURITY, SERVER, STATE, STORED, setting
from tonle.config.stores import MEMORY, SAME, cache_place, responses_place, state_place
from tonle.config.values import ValueType
from tonle.errors import ConfigError

HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_LOOPBACK = ("localhost", "127.", "::1")


def _server(default: Any, type: ValueType, help: str) -> Any:
    return setting(SERVER, default, type, help)


def _security(default: Any, type: ValueType, help: str) -> Any:
    return setting(SECURITY, default, type, help)


def _file(help: str) -> Any:
    return _security(None, values.optional(values.path(), none=""), help)


def _limit(help: str) -> Any:
    return setting(LIMITS, None, values.optional(values.integer(1), none="no limit"), help)


def _cache(default: Any, type: ValueType, help: str) -> Any:
    return setting(CACHE, default, type, help)


def _stored(default: Any, type: ValueType, help: str) -> Any:
    return setting(STORED, default, type, help)


def _inference(default: Any, type: ValueType, help: str) -> Any:
    return setting(INFERENCE, default, type, help)


def port_setting(default: int) -> Any:
    return _server(default, values.integer(0, 65535), "Port to listen on; 0 picks a free one.")


def cache_by_default_setting(default: bool) -> Any:
    return _cache(
        default,
        values.boolean(),
        "Answer repeated requests that would get the same answer (temperature 0, or a seed) from the cache unless they "
        "say otherwise. If off, only requests with use_cache: true use it.",
    )


def log_level_setting(*, engine: str | None = None) -> Any:
    return setting(
        LOGGING, "INFO", values.choice("DEBUG", "INFO", "WARNING", "ERROR"),
        "Log messages of this severity and above: DEBUG, INFO, WARNING or ERROR.", engine=engine,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(ObserveConfig):
    """What every HTTP server of ours can be told."""

    host: str = _server("127.0.0.1", values.text("HOST"), "Address to listen on; 0.0.0.0 for every network interface.")
    port: int = port_setting(8000)
    max_body_bytes: int = _server(8 * 1024**2, values.size(), "Largest request body accepted.")
    max_upload_bytes: int = _server(
        25 * 1024**2, values.size(), "The same for bodies with files, such as sound to be transcribed."
    )
    request_memory_bytes: int = _server(
        256 * 1024**2,
        values.size(),
        "Most memory for requests, all of them together, from their first byte to the end of their answer. Above it, the "
        "largest of those still being received is refused (503).",
    )
    max_connections: int = _server(
        4096,
        values.integer(1),
        "Most connections from callers. For one more, those that are idle are closed; if none is, it is refused (503).",
    )
    drain_s: float = _server(
        30.0, values.duration(), "How long running requests may take to finish after SIGTERM or Ctrl-C."
    )
    write_timeout_s: float = _server(
        60.0, values.duration(), "Drop a client that reads nothing of its answer for this long."
    )
    strict: bool = _server(
        False, values.boolean(), "Refuse requests with unknown or unsupported fields instead of warning about them."
    )
    cors_origins: tuple[str, ...] = _server(
        (),
        values.names("ORIGIN"),
        "Let web pages from this origin call the API, such as https://app.example.com, or * for all. Repeat the flag for "
        "more. By default none may.",
    )

    api_key: tuple[str, ...] = _security(
        (), values.names("KEY"), "Key that callers must send as a bearer token. Repeat the flag for more."
    )
    admin_key: tuple[str, ...] = _security(
        (), values.names("KEY"), "Key that may also use the /admin paths and clear the cache."
    )
    allowed_hosts: tuple[str, ...] = _security(
        (),
        values.names("HOST"),
        "Name in the Host header that this server answers to, or * for any. Repeat the flag for more. A server on a "
        "loopback address answers to localhost, IP addresses and these, with keys on /dashboard only; any other server to "
        "every name, unless this is set.",
    )
    ssl_certfile: str | None = _file("Serve HTTPS with this certificate: a PEM file with the whole chain.")
    ssl_keyfile: str | None = _file("Private key of the certificate, a PEM file.")
    ssl_keyfile_password: str | None = _security(
        None, values.optional(values.secret(), none=""), "Password of an encrypted private key."
    )
    ssl_ca_certs: str | None = _file("CA certificates that client certificates are checked against, a PEM file.")
    ssl_cert_reqs: int = _security(
        0, values.integer(0, 2), "Client certificates: 0 does not ask for them, 1 checks those sent, 2 requires them."
    )
    trusted_proxies: tuple[str, ...] = _security(
        (),
        values.networks(),
        "Addresses or networks of proxies whose header with the caller's address is trusted. By default none is.",
    )
    forwarded_header: str = _security(
        "x-forwarded-for",
        values.choice("x-forwarded-for", "forwarded"),
        "Header in which those proxies send the address: x-forwarded-for or forwarded. The other one is ignored.",
    )

    state_db: str | None = setting(
        STATE,
        None,
        values.optional(state_place(), none="the file $XDG_STATE_HOME/tonle/gateway.db"),
        "Where keys made by `tonle keys` or POST /admin/keys and their usage are stored: a file, or redis://… or "
        "postgresql://… to share them between gateways. `tonle serve` uses it if this or an admin key is set.",
    )

    requests_per_minute: int | None = _limit("Requests per minute.")
    tokens_per_minute: int | None = _limit("Tokens per minute, prompt and answer.")
    max_concurrent_per_key: int | None = _limit("Concurrent requests.")
    tokens_per_day: int | None = _limit("Tokens per day (UTC).")
    audio_seconds_per_minute: int | None = _limit("Seconds of sound per minute, transcribed or spoken.")
    images_per_minute: int | None = _limit("Images per minute.")

    cache: str | None = _cache(
        MEMORY, cache_place(), "Where answers are cached: memory, redis://…, or off for no response cache."
    )
    cache_by_default: bool = cache_by_default_setting(True)
    cache_max_size: int | None = _cache(
        None, values.optional(values.integer(1), none="1000"), "Most answers kept in memory."
    )
    cache_ttl_s: float = _cache(3600.0, values.duration(), "Lifetime of a cached answer.")
    cache_max_bytes: int | None = _cache(
        None,
        values.optional(values.size(), none="64MiB"),
        "Most memory for cached answers. Redis has its own limits.",
    )

    response_store: str | None = _stored(
        SAME,
        responses_place(),
        "Where responses are kept, for previous_response_id: memory, redis://…, off or auto. "
        "auto: in the cache's Redis if cache names one, else in memory.",
    )
    response_store_ttl_s: float = _stored(
        86400.0, values.duration(), "How long a response is kept after it was last used."
    )
    response_store_max_size: int | None = _stored(
        None, values.optional(values.integer(1), none="10000"), "Most responses kept in memory."
    )
    response_store_max_bytes: int | None = _stored(
        None,
        values.optional(values.size(), none="64MiB"),
        "Most memory for them. Redis has its own limits.",
    )

    sla_p95_s: float = _inference(2.0, values.duration(), "p95 latency target that /health reports on.")
    context_window: int | None = _inference(
        10,
        values.optional(values.integer(1), none="all"),
        "Most messages of a conversation that /api/v1/inference sends to the model.",
    )
    max_context_length: int | None = _inference(
        2048,
        values.optional(values.tokens(16), none="no limit"),
        "Most tokens of those messages (estimated); the oldest are left out first.",
    )

    log_level: str = log_level_setting()
    log_json: bool = setting(LOGGING, False, values.boolean(), "Log JSON lines instead of text.")

    @property
    def loopback(self) -> bool:
        """Only programs on this machine can reach the address."""
        return self.host.startswith(_LOOPBACK)

    def check_cache(self) -> None:
        """Raises `ConfigError`."""
        for name, limit in (("cache_max_size", self.cache_max_size), ("cache_max", self.cache_max_bytes)):
            if limit is not None and self.cache not in (None, MEMORY):
                raise ConfigError(f"{name} has no effect on a cache in Redis; remove it, and set maxmemory and an "
                                  "eviction policy (maxmemory-policy volatile-lru) in that Redis instead",
                                  param=name)  # fmt: skip

    def check_responses(self) -> None:
        """Raises `ConfigError`."""
        if self.response_store_ttl_s <= 0:
            raise ConfigError("response_store_ttl must be more than 0; to keep no responses, set response_store to off",
                              param="response_store_ttl")  # fmt: skip
        limits = (("response_store_max_size", self.response_store_max_size),
                  ("response_store_max", self.response_store_max_bytes))  # fmt: skip
        for name, limit in limits:
            if limit is not None and self.responses_place not in (None, MEMORY):
                raise ConfigError(f"{name} has no effect on responses in Redis; remove it, and set maxmemory and an "
                                  "eviction policy (maxmemory-policy volatile-lru) in that Redis instead",
                                  param=name)  # fmt: skip

    @property
    def responses_place(self) -> str | None:
        """Where responses are kept: `MEMORY`, the URL of a Redis, or None: nowhere."""
        if self.response_store != SAME:
            return self.response_store
        return MEMORY if self.cache is None else self.cache

    def check_origins(self) -> None:
        """Raises `ConfigError`."""
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+|null", origin):
                raise ConfigError(f"cors_origins: {origin!r} is not an origin such as https://app.example.com: a scheme, a "
                                  "host, perhaps a port, and no path", param="cors_origins")  # fmt: skip

    def check_requests(self) -> None:
        """Raises `ConfigError`."""
        if self.request_memory_bytes < self.max_body_bytes:
            raise ConfigError(f"request_memory ({values.show_size(self.request_memory_bytes)}) is less than max_body "
                              f"({values.show_size(self.max_body_bytes)}), so that the largest request could never be received; "
                              "raise it, to several times max_body", param="request_memory")  # fmt: skip
        for host in self.allowed_hosts:
            if host != "*" and not HOST_NAME.fullmatch(host):
                raise ConfigError(f"allowed_hosts: {host!r} is not a host name such as models.example.com: give it without "
                                  "scheme and port", param="allowed_hosts")  # fmt: skip

    def check_observed(self) -> None:
        """Raises `ConfigError`."""
        if self.price_per_hour is not None and self.price_per_hour > MAX_PRICE:
            raise ConfigError(f"price_per_hour must be at most {MAX_PRICE:,.0f}, not {self.price_per_hour:g}",
                              param="price_per_hour")  # fmt: skip
        for name in ("sla_p95", "sla_ttft_p95", "sla_itl_p95"):
            target_s = getattr(self, f"{name}_s")
            if target_s is not None and target_s <= 0:
                raise ConfigError(f"{name} must be more than 0: no request takes no time", param=name)
        if self.alert_secret is not None and self.alert_webhook is None:
            raise ConfigError("alert_secret is set but alert_webhook is not: there are no posts to sign; set the address that "
                              "gets them, or remove the secret", param="alert_webhook")  # fmt: skip

    def check_tls(self) -> None:
        """What can be told without reading the files. Raises `ConfigError`."""
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given, missing = ("ssl_certfile", "ssl_keyfile") if self.ssl_certfile else ("ssl_keyfile", "ssl_certfile")
            raise ConfigError(f"{given} is set but {missing} is not: HTTPS needs both", param=missing)
        for name in ("ssl_keyfile_password", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(self, name) and self.ssl_certfile is None:
                raise ConfigError(f"{name} is set but ssl_certfile and ssl_keyfile are not", param=name)
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("ssl_cert_reqs asks for client certificates, but ssl_ca_certs does not say which CAs to trust",
                              param="ssl_ca_certs")  # fmt: skip
        if self.ssl_ca_certs is not None and not self.ssl_cert_reqs:
            raise ConfigError("ssl_ca_certs is set, but ssl_cert_reqs is 0, so no client certificate would be checked; "
                              "set it to 2 (required) or 1 (checked if sent)", param="ssl_cert_reqs")  # fmt: skip
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).expanduser().is_file():
                raise ConfigError(f"{name}: there is no file {path}", param=name)
