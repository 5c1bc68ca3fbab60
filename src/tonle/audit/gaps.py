"""`Gaps`: what the chain has to be told of requests that have no record of their own.

Does: collect records that were lost, requests that were turned away and refusals that were only counted, as the facts of one
`gap` line, under the trail's rules for masking. Does not: write the line (`trail.py`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from tonle.audit.audit_stats import AuditStats
from tonle.audit.intents import Place
from tonle.audit.plain_values import said
from tonle.audit.record import Record
from tonle.audit.redaction import Redactor
from tonle.audit.refusal_cap import Counted, RefusalCap

MAX_IDS = 1000  # requests that a gap names
TELL_S = 5.0  # between two lines that count what is not recorded one by one


class Gaps:
    """`lose` is for any thread, the rest for the trail's."""

    def __init__(self, stats: AuditStats, cap: RefusalCap, redactor: Redactor, omit: tuple[str, ...]) -> None:
        self.why_lost = ""
        self._stats = stats
        self._cap = cap
        self._redactor = redactor
        self._omit = omit
        self._ids: deque[str] = deque(maxlen=MAX_IDS)
        self._lock = threading.Lock()  # records are lost on the server's thread, and told of on the trail's
        self._told = stats.gap()  # what the chain knows of losses
        self._counted: Counted | None = None  # taken from the cap, and not in the chain yet
        self._told_s = 0.0  # monotonic; when the chain last heard what the cap counted
        self._telling: tuple[dict[str, int], list[str]] = (self._told, [])  # numbers and ids in the line being written

    def lose(self, records: Iterable[Record], reason: str) -> None:
        ids = [said(self._allowed("request_id", record.request_id)) for record in records]
        with self._lock:
            self._ids.extend(ids)
            self._stats.lost += len(ids)
            self.why_lost = reason

    def is_due(self, *, at_once: bool) -> bool:
        """Whether there is something to tell. `at_once`: what was counted, too, without waiting for more."""
        if self._told != self._stats.gap() or self._counted is not None:
            return True
        return self._cap.has_counted and (at_once or time.monotonic() - self._told_s >= TELL_S)

    def facts(self, *, at_once: bool) -> dict[str, Any] | None:
        """Of the line to write now; None: there is nothing to tell."""
        with self._lock:
            gap, ids = self._telling = self._stats.gap(), list(self._ids)
        lost: dict[str, Any] = {}
        if gap != self._told:
            more = {name: number - self._told[name] for name, number in gap.items()}
            lost = {**more, "request_ids": ids}
        if self._counted is None and self.is_due(at_once=at_once) and self._cap.has_counted:
            self._counted = self._cap.take()  # it stays here until the chain has it: that may need several tries
        if self._counted is not None:
            rows = self._counted.facts()
            lost["unrecorded"] = [{**row, "client": self._allowed("client", row["client"])} for row in rows]
        return lost or None

    def note_told(self) -> list[Place]:
        """The chain has the last facts; others may have come meanwhile. Returns places of requests that are counted now."""
        self._told, ids = self._telling
        with self._lock:
            for request_id in ids:  # the oldest; some may have been pushed out
                if self._ids and self._ids[0] == request_id:
                    self._ids.popleft()
        if self._counted is None:
            return []
        places, self._counted, self._told_s = self._counted.places, None, time.monotonic()
        return places

    def _allowed(self, field: str, value: Any) -> Any:
        """A fact of a record as the rules of this trail let it be written."""
        return None if field in self._omit else self._redactor.mask(value, Counter(), field=field)
