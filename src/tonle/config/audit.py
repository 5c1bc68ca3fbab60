"""`AuditConfig`: the settings of an audit trail, shared by server, gateway and the standalone middleware.

Does: hold names, defaults and reasons once, so that a file, a variable and a flag say the same everywhere. Does not: act
on them, or know what a field or a pattern is called (`tonle.audit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tonle.config import kinds, knobs
from tonle.config.kinds import Kind
from tonle.config.knobs import Knob, knob, knobs_of

FSYNC = ("never", "interval", "always")
ON_FULL = ("refuse", "serve")


def _audit(default: Any, kind: Kind, help: str) -> Any:
    return knob("Audit", default, kind, help)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Without `audit_dir` the others have no effect."""

    audit_dir: str | None = knob(
        knobs.FRONT_DOOR,
        None,
        kinds.optional(kinds.text(), none="no audit"),
        "Write one record per request to this folder.",
    )
    audit_fsync: str = _audit(
        "interval", kinds.choice(*FSYNC), "When records reach the disk: never (the kernel decides), interval or always."
    )
    audit_fsync_interval_s: float = _audit(1.0, kinds.duration(), "How often, with interval.")
    audit_on_full: str = _audit(
        "refuse", kinds.choice(*ON_FULL), "When records cannot be kept: refuse requests, or serve and alarm."
    )
    audit_min_free_bytes: int = _audit(64 * 1024**2, kinds.size(0), "With less free space the disk counts as full.")
    audit_max_queue: int = _audit(10_000, kinds.whole(1), "Records that may wait to be written.")
    audit_linger_s: float = _audit(0.02, kinds.duration(), "How long a batch waits for more records.")
    audit_redact: tuple[str, ...] = _audit(
        (),
        kinds.rules(),
        "What never reaches the disk: a pattern (email, phone, all, ...), name=regex, or either after FIELD:. "
        "Give it several times.",
    )
    audit_omit: tuple[str, ...] = _audit((), kinds.names(), "Fields that are not recorded, such as messages.")
    audit_retention_days: int | None = _audit(
        None, kinds.optional(kinds.whole(1), none="kept"), "Days after which records are removed."
    )
    audit_key_file: str | None = _audit(
        None, kinds.optional(kinds.text(), none="audit.key beside the records"), "The key that signs the trail."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MiddlewareConfig(AuditConfig):
    """What only `tonle.audit.AuditMiddleware` has: it stands in front of a server that knows nothing of it."""

    audit_inject_usage: bool = _audit(
        True, kinds.switch(), "Ask for the usage of a stream although the caller did not."
    )
    audit_max_body_bytes: int = _audit(32 * 1024**2, kinds.size(), "Of a larger request only the size is recorded.")


MIDDLEWARE_KNOBS: dict[str, Knob] = knobs_of(MiddlewareConfig)
