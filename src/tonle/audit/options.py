"""`AuditOptions`: the knobs of the audit trail, and how the environment spells them for the standalone middleware.

Does: hold and check. Does not: act on a knob.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tonle.config import kinds
from tonle.config.kinds import Kind
from tonle.errors import ConfigError

MIB = 1024**2
KEY_NAME = "audit.key"

Fsync = Literal["never", "interval", "always"]
OnFull = Literal["refuse", "serve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """Settings of one audit directory. Several processes may write to the same one."""

    directory: Path
    fsync: Fsync = "interval"  # never: the kernel decides · interval: every fsync_interval_s · always: every batch
    fsync_interval_s: float = 1.0
    on_full: OnFull = "refuse"  # when records cannot be kept: refuse requests, or serve them, count and raise the alarm
    min_free_bytes: int = 64 * MIB  # below this the disk counts as full
    max_queue: int = 10_000  # records waiting to be written
    linger_s: float = 0.02  # how long a batch may wait for more records
    redact: tuple[str, ...] = ()  # names of built-in patterns, or name=regex; matches never reach the disk
    omit: tuple[str, ...] = ()  # fields that are not recorded at all, such as messages
    retention_days: int | None = None  # days older than this are removed; None = kept
    key_file: Path | None = None  # signs the heads; None = audit.key in the directory
    inject_usage: bool = True  # middleware: ask the model for usage although the caller did not
    max_body_bytes: int = 32 * MIB  # middleware: of a larger request only the size is recorded

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        for name, words in (("fsync", ("never", "interval", "always")), ("on_full", ("refuse", "serve"))):
            if getattr(self, name) not in words:
                raise ConfigError(f"{name} must be one of {', '.join(words)}, not {getattr(self, name)!r}", param=name)
        for name in ("fsync_interval_s", "max_queue", "max_body_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}", param=name)
        for name in ("min_free_bytes", "linger_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}", param=name)
        if self.retention_days is not None and self.retention_days < 1:
            raise ConfigError(f"retention_days must be at least 1, not {self.retention_days}", param="retention_days")

    @property
    def signing_key(self) -> Path:
        return self.key_file or self.directory / KEY_NAME


_DAYS = kinds.optional(kinds.whole(1), none="kept")
_KINDS: dict[str, tuple[str, Kind]] = {
    # variable without TONLE_AUDIT_ : field, how it is read
    "DIR": ("directory", kinds.text()),
    "FSYNC": ("fsync", kinds.choice("never", "interval", "always")),
    "FSYNC_INTERVAL": ("fsync_interval_s", kinds.duration()),
    "ON_FULL": ("on_full", kinds.choice("refuse", "serve")),
    "MIN_FREE": ("min_free_bytes", kinds.size(0)),
    "MAX_QUEUE": ("max_queue", kinds.whole(1)),
    "LINGER": ("linger_s", kinds.duration()),
    "REDACT": ("redact", kinds.names()),
    "OMIT": ("omit", kinds.names()),
    "RETENTION_DAYS": ("retention_days", _DAYS),
    "KEY_FILE": ("key_file", kinds.text()),
    "INJECT_USAGE": ("inject_usage", kinds.switch()),
    "MAX_BODY": ("max_body_bytes", kinds.size()),
}
ENV_PREFIX = "TONLE_AUDIT_"


def from_environ(environ: Mapping[str, str]) -> AuditOptions:
    """Options of a middleware that nobody can pass arguments to. An empty variable counts as none."""
    values: dict[str, Any] = {"directory": Path("audit")}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or not text:
            continue
        try:
            field, kind = _KINDS[variable.removeprefix(ENV_PREFIX)]
            values[field] = kind.read(text)
        except KeyError:
            known = ", ".join(ENV_PREFIX + name for name in _KINDS)
            raise ConfigError(f"unknown environment variable {variable}; there are: {known}", param=variable) from None
        except ValueError as error:
            raise ConfigError(f"the environment variable {variable} {error}", param=variable) from None
    for name in ("directory", "key_file"):
        if values.get(name) is not None:
            values[name] = Path(values[name])
    return AuditOptions(**values)
