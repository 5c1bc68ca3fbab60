"""`RefusalCap`: how many refused requests of unknown callers get a record each, and a count of the others.

Who has no key can ask as often as it likes: a record for each would fill the disk. So each address gets so many records per
second, all addresses together get so many, and of the rest the chain says how many there were, from where, why they were
refused, and between which times. Nothing is left out in silence.

Does: decide and count, in bounded memory. Does not: write (`trail.py`).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tonle.audit.day_ledger import text_of
from tonle.audit.intents import Place
from tonle.audit.record import Record

MAX_ROWS = 200  # of one line of the chain; further addresses are counted together
MAX_PLACES = 5_000  # open requests that recovery would still find; more are forgotten before they are told of
OTHERS = "other addresses"


@dataclass(slots=True)
class _Row:
    num_requests: int
    num_bytes: int  # received
    first_ns: int
    last_ns: int


@dataclass(slots=True)
class Counted:
    """What was not recorded one by one since the last time."""

    rows: dict[tuple[str | None, int | None, str], _Row] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)  # in the files of open requests

    def add(self, record: Record) -> Place | None:
        """Returns a place for which there is no room."""
        code = record.error.get("code") if isinstance(record.error, dict) else None
        key = (record.client, record.http_status, str(code or "")[:64])
        if key not in self.rows and len(self.rows) >= MAX_ROWS:
            key = (OTHERS, *key[1:])
        row = self.rows.setdefault(key, _Row(0, 0, record.closed_ns, record.closed_ns))
        row.num_requests += 1
        row.num_bytes += 0 if record.unread is None else record.unread.num_received
        row.num_bytes += len(record.body) if isinstance(record.body, bytes) else 0
        row.first_ns, row.last_ns = min(row.first_ns, record.opened_ns), max(row.last_ns, record.closed_ns)
        place: Place | None = record.intent
        record.intent = None
        if place is None or len(self.places) >= MAX_PLACES:
            return place
        self.places.append(place)
        return None

    def facts(self) -> list[dict[str, Any]]:
        """As a line of the chain has them."""
        return [
            {
                "client": client,
                "http_status": http_status,
                "code": code or None,
                "requests": row.num_requests,
                "received_bytes": row.num_bytes,
                "from": text_of(row.first_ns),
                "to": text_of(row.last_ns),
            }
            for (client, http_status, code), row in self.rows.items()
        ]


class RefusalCap:
    """For any thread."""

    def __init__(self, per_address: int, in_all: int) -> None:
        """Records per second."""
        self._per_address = per_address
        self._in_all = in_all
        self._second = 0  # monotonic
        self._num_records = 0  # in that second
        self._of_address: dict[str | None, int] = {}  # likewise; no longer than `in_all`
        self._counted = Counted()
        self._lock = threading.Lock()

    def may_record(self, address: str | None) -> bool:
        """Whether this refused request gets a record. Each call counts."""
        second = int(time.monotonic())
        with self._lock:
            if second != self._second:
                self._second, self._num_records = second, 0
                self._of_address.clear()
            if self._num_records >= self._in_all:
                return False
            num_records = self._of_address.get(address, 0)
            if num_records >= self._per_address:
                return False
            self._of_address[address] = num_records + 1
            self._num_records += 1
            return True

    def count(self, record: Record) -> Place | None:
        """Instead of a record. Returns a place in the files of open requests that must be voided now."""
        with self._lock:
            return self._counted.add(record)

    @property
    def has_counted(self) -> bool:
        return bool(self._counted.rows)

    def take(self) -> Counted:
        with self._lock:
            counted, self._counted = self._counted, Counted()
        return counted
