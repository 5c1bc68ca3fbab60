"""What a trail tells its operator: alarms when something begins or ends, and counters.

Does: hold them. Does not: decide when (`trail.py`), or show them (`audit_metrics.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something an operator must know now. `failing` begins a trouble, `recovered` ends it, `lost` counts."""

    kind: Literal["failing", "lost", "recovered"]
    message: str
    num_lost: int = 0


@dataclass(slots=True)
class AuditStats:
    """Counters since the start; read them from any thread."""

    opened: int = 0
    written: int = 0
    lost: int = 0  # closed, and given up
    refused: int = 0  # turned away by `admit`
    unrecorded: int = 0  # refused requests of unknown callers that are counted instead of recorded one by one
    failing: str | None = None  # why nothing can be written at the moment

    def gap(self) -> dict[str, int]:
        return {"lost": self.lost, "refused": self.refused}
