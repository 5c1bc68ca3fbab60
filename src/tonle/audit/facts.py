"""`Facts`: a closed record as plain values, the form in which it is written or sent to the process that writes.

Does: copy references out of a `Record`. Does not: interpret them (`document.py`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec

from tonle.audit.record import Record
from tonle.protocol.answers import Answer


class Facts(msgspec.Struct, array_like=True):
    """The names are those of `Record`. Fields from outside may have any type: odd values are recorded too."""

    id: str
    opened_ns: int
    opened_s: float
    closed_ns: int
    closed_s: float
    endpoint: str
    request_id: Any
    client: Any
    body: Any
    key_id: Any
    model: Any
    model_config: Any
    adapter: Any
    cache: Any
    route: Any
    experiment: Any
    warnings: Any
    timings_ms: Any
    status: Any
    http_status: Any
    answer: Answer | None
    output: Any
    usage: Any
    error: Any
    response_id: Any
    finish_reason: Any

    def without_content(self) -> Facts:
        """What can always be written."""
        return msgspec.structs.replace(
            self, body=None, answer=None, output=None, usage=None, error=None, model_config=None, timings_ms={},
            cache=None, route=None, experiment=None, warnings=["the content could not be recorded"],
        )  # fmt: skip


# In the order of `Facts`.
values_of = attrgetter(*Facts.__struct_fields__)


def facts_of(record: Record) -> Facts:
    return Facts(*values_of(record))
