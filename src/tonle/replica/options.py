"""`ReplicaOptions`: the knobs of the HTTP side of a replica."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from tonle.errors import ConfigError

MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    max_body_bytes: int = 8 * MIB  # a larger request body is refused with 413
    max_choices: int = 128  # prompts x n of one request
    strict: bool = False  # True: a field that would only be warned about is an error (per request: X-Tonle-Strict: 1)
    aliases: tuple[str, ...] = ()  # more names the model answers to
    trust_salt: bool = False  # True: the header X-Tonle-Salt says who shares cached prefixes; only behind a gateway
    write_timeout_s: float = 60.0  # a caller who reads nothing for this long is given up

    # Where this process is one of several front ends
    metrics_dir: str | None = None  # the folder in which all of them count
    started_s: float | None = None  # when the server began, `time.monotonic()`; None = with this process

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        for name in ("max_body_bytes", "max_choices", "write_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}", param=name)

    def shared_by_front_ends(self, metrics_dir: str) -> ReplicaOptions:
        """For each of several front ends of a server that begins now."""
        return replace(self, metrics_dir=metrics_dir, started_s=time.monotonic())
