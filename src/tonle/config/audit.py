"""`AuditConfig`: the settings of an audit trail, shared by server, gateway and the standalone middleware.

Does: hold names, defaults and help once, so that a file, a variable and a flag mean the same everywhere. Does not: act
on them, or know what a field or a pattern is called (`tonle.audit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tonle.config import values
from tonle.config.setting import AUDIT, Setting, setting, settings_of
from tonle.config.values import ValueType

FSYNC = ("never", "interval", "always")
ON_FULL = ("refuse", "serve")
MEDIA = ("none", "hashes", "store")


def _audit(default: Any, type: ValueType, help: str) -> Any:
    return setting(AUDIT, default, type, help)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Without `audit_dir` the others have no effect."""

    audit_dir: str | None = _audit(
        None, values.optional(values.path(), none="no audit"), "Write one record per request to this folder."
    )
    audit_fsync: str = _audit(
        "interval",
        values.choice(*FSYNC),
        "When records are flushed to disk: never (the kernel decides), interval, or always (every batch).",
    )
    audit_fsync_interval_s: float = _audit(1.0, values.duration(), "Time between flushes, with --audit-fsync interval.")
    audit_on_full: str = _audit(
        "refuse",
        values.choice(*ON_FULL),
        "When records cannot be written: refuse requests, or serve and raise an alarm.",
    )
    audit_min_free_bytes: int = _audit(
        64 * 1024**2, values.size(0), "Treat the disk as full when less than this is free."
    )
    audit_max_queue: int = _audit(10_000, values.integer(1), "Most records waiting to be written.")
    audit_max_memory_bytes: int = _audit(128 * 1024**2, values.size(), "Most memory for records waiting to be written.")
    audit_refused_per_address: int = _audit(
        20,
        values.integer(0),
        "Most records per second of requests refused for want of a valid key from one address; more are only counted.",
    )
    audit_refused_per_second: int = _audit(200, values.integer(0), "The same for all addresses together.")
    audit_linger_s: float = _audit(0.02, values.duration(), "How long a batch of records waits for more to join it.")
    audit_redact: tuple[str, ...] = _audit(
        (),
        values.rules(),
        "Text to remove before a record is written: a pattern (email, phone, all, ...) or name=regex, optionally after "
        "FIELD:. Repeat the flag for more.",
    )
    audit_omit: tuple[str, ...] = _audit((), values.names(), "Fields to leave out of records, such as messages.")
    audit_media: str = _audit(
        "hashes",
        values.choice(*MEDIA),
        "What is kept of sound and pictures, beside name, type and size: none (nothing more), hashes, or store (they "
        "themselves, in media/ beside the records).",
    )
    audit_retention_days: int | None = _audit(
        None, values.optional(values.integer(1), none="never"), "Delete records after this many days."
    )
    audit_key_file: str | None = _audit(
        None, values.optional(values.path(), none="audit.key next to the records"), "Key that signs the trail."
    )
    audit_fingerprint: str | None = _audit(
        None,
        values.optional(values.text("HEX"), none="any"),
        "Refuse to start if the signing key has another fingerprint (tonle audit verify prints it).",
    )
    audit_anchor: str | None = _audit(
        None,
        values.optional(values.path(), none="the state directory only"),
        "Also append the end of the chain to this file, every minute and at the end.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MiddlewareConfig(AuditConfig):
    """Adds what only `tonle.audit.AuditMiddleware` needs: it wraps a server that knows nothing of it."""

    audit_inject_usage: bool = _audit(
        True, values.boolean(), "Ask for a stream's token counts even if the caller did not."
    )
    audit_max_body_bytes: int = _audit(
        32 * 1024**2, values.size(), "Record only the size of request bodies larger than this."
    )


MIDDLEWARE_SETTINGS: dict[str, Setting] = settings_of(MiddlewareConfig)
