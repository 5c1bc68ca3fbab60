"""`Facts`: a closed record as plain values, the form in which it is written or sent to the process that writes.

Does: copy references out of a `Record`. Does not: interpret them (`document.py`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec

from tonle.audit.body_summary import BodySummary, summary_of
from tonle.audit.plain_values import plain, said
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
    unread: BodySummary | None
    key_id: Any
    model: Any
    model_config: Any
    adapter: Any
    adapter_digest: Any
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
    chain_id: Any
    previous_id: Any
    media: Any = None

    def made_plain(self) -> Facts:
        """The same, with every value in a form that can be written, whatever it was."""
        answer = self.answer
        if answer is not None:
            answer = Answer(
                choices=answer.choices, response_id=plain(answer.response_id), model=plain(answer.model),
                usage=plain(answer.usage), error=plain(answer.error), raw=plain(answer.raw), complete=answer.complete,
            )  # fmt: skip
        body = self.body if isinstance(self.body, bytes) else plain(self.body)
        own = ("id", "opened_ns", "opened_s", "closed_ns", "closed_s", "unread")
        values = {name: plain(getattr(self, name)) for name in Facts.__struct_fields__ if name not in own}
        values |= {"answer": answer, "body": body, "endpoint": said(self.endpoint)}
        return msgspec.structs.replace(self, **values)

    def without_content(self) -> Facts:
        """What can always be written: of the body its length and hash, of the rest who asked for what, and when."""
        names = ("request_id", "client", "key_id", "status", "model", "adapter", "adapter_digest", "response_id",
                 "finish_reason")  # fmt: skip
        texts = {name: None if (value := getattr(self, name)) is None else said(value) for name in names}
        unread = summary_of(self.body) if isinstance(self.body, bytes) else self.unread
        if unread is not None:
            unread = msgspec.structs.replace(unread, first=b"")
        http_status = self.http_status if isinstance(self.http_status, int) else None
        return msgspec.structs.replace(
            self, **texts, endpoint=said(self.endpoint), http_status=http_status, body=None, unread=unread, answer=None,
            output=None, usage=None, error=None, model_config=None, timings_ms={}, cache=None, route=None,
            experiment=None, warnings=["the content could not be recorded"],
        )  # fmt: skip


# In the order of `Facts`.
values_of = attrgetter(*Facts.__struct_fields__)


def facts_of(record: Record) -> Facts:
    return Facts(*values_of(record))
