"""`AuditOptions`: what a trail is told, made from settings or, for the standalone middleware, from variables.

Does: hold and check. Does not: name settings (`tonle.config.audit`) or act on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from tonle.config.audit import FSYNC, MEDIA, MIDDLEWARE_SETTINGS, ON_FULL, AuditConfig, MiddlewareConfig
from tonle.errors import ConfigError

MIB = 1024**2
KEY_NAME = "audit.key"
DEFAULT_DIRECTORY = "audit"  # of the middleware

Fsync = Literal["never", "interval", "always"]
Media = Literal["none", "hashes", "store"]
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
    max_memory_bytes: int = 128 * MIB  # of records waiting to be written
    refused_per_address: int = 20  # records per second of refused requests of an unknown caller; more are counted
    refused_per_second: int = 200  # the same, of all addresses together
    linger_s: float = 0.02  # how long a batch may wait for more records
    redact: tuple[str, ...] = ()  # names of built-in patterns, or name=regex; matches never reach the disk
    omit: tuple[str, ...] = ()  # fields that are not recorded at all, such as messages
    media: Media = "hashes"  # of sound and pictures: their size, also their hash, or they themselves
    retention_days: int | None = None  # days older than this are removed; None = kept
    key_file: Path | None = None  # signs the heads; None = audit.key in the directory
    fingerprint: str | None = None  # of the only key that may sign; None = any
    anchor: Path | None = None  # a file that gets the end of the chain, besides the state directory
    inject_usage: bool = True  # middleware: ask the model for usage although the caller did not
    max_body_bytes: int = 32 * MIB  # middleware: of a larger request only the size is recorded

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        for name, words in (("fsync", FSYNC), ("on_full", ON_FULL), ("media", MEDIA)):
            if getattr(self, name) not in words:
                raise ConfigError(f"{name} must be one of {', '.join(words)}, not {getattr(self, name)!r}", param=name)
        for name in ("fsync_interval_s", "max_queue", "max_memory_bytes", "max_body_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}", param=name)
        for name in ("min_free_bytes", "linger_s", "refused_per_address", "refused_per_second"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}", param=name)
        if self.media == "store" and self.redact:
            raise ConfigError("audit_media store keeps recordings and pictures as they are, and audit_redact can find nothing in "
                              "them; set audit_media to hashes, or leave audit_redact out", param="media")  # fmt: skip
        if self.retention_days is not None and self.retention_days < 1:
            raise ConfigError(f"retention_days must be at least 1, not {self.retention_days}", param="retention_days")

    @property
    def flush_every_s(self) -> float | None:
        """None: not by the clock."""
        return self.fsync_interval_s if self.fsync == "interval" else None

    @property
    def signing_key(self) -> Path:
        return self.key_file or self.directory / KEY_NAME


ENV_PREFIX = "TONLE_AUDIT_"


def from_config(config: AuditConfig) -> AuditOptions | None:
    """The options those settings mean; None where no trail is wanted. Raises `ConfigError`."""
    if config.audit_dir is None:
        return None
    return AuditOptions(
        directory=Path(config.audit_dir),
        fsync=cast(Fsync, config.audit_fsync),
        fsync_interval_s=config.audit_fsync_interval_s,
        on_full=cast(OnFull, config.audit_on_full),
        min_free_bytes=config.audit_min_free_bytes,
        max_queue=config.audit_max_queue,
        max_memory_bytes=config.audit_max_memory_bytes,
        refused_per_address=config.audit_refused_per_address,
        refused_per_second=config.audit_refused_per_second,
        linger_s=config.audit_linger_s,
        redact=config.audit_redact,
        omit=config.audit_omit,
        media=cast(Media, config.audit_media),
        retention_days=config.audit_retention_days,
        key_file=Path(config.audit_key_file) if config.audit_key_file else None,
        fingerprint=config.audit_fingerprint,
        anchor=Path(config.audit_anchor) if config.audit_anchor else None,
    )


def from_environ(environ: Mapping[str, str]) -> AuditOptions:
    """Options of a middleware that is given no arguments. An empty variable counts as none."""
    ours = {setting.env: setting for setting in MIDDLEWARE_SETTINGS.values()}
    values: dict[str, Any] = {"audit_dir": DEFAULT_DIRECTORY}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or not text:
            continue
        try:
            values[ours[variable].field] = ours[variable].type.read(text)
        except KeyError:
            raise ConfigError(
                f"unknown environment variable {variable}; there are: {', '.join(ours)}", param=variable
            ) from None
        except ValueError as error:
            raise ConfigError(f"the environment variable {variable} {error}", param=variable) from None
    config = MiddlewareConfig(**values)
    options = from_config(config)
    if options is None:
        raise ConfigError(f"{ENV_PREFIX}DIR is none: a middleware for records needs a folder", param="audit_dir")
    return replace(options, inject_usage=config.audit_inject_usage, max_body_bytes=config.audit_max_body_bytes)
