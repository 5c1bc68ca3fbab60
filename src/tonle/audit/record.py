"""`Record`: the facts of one request while it runs.

Does: hold references, as cheaply as Python can; hand itself over when closed. Does not: parse, copy, format or write;
the trail's thread does (`document.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from tonle.audit.body_summary import BodySummary
from tonle.errors import InternalError
from tonle.protocol.answers import Answer
from tonle.protocol.random_ids import random_hex

Status = Literal["ok", "cached", "refused", "failed", "cancelled", "interrupted"]
# ok: answered in full · cached: from the response cache · refused: nothing was computed, the caller or the moment was
# wrong · failed: our side broke · cancelled: the caller left · interrupted: the server stopped or died meanwhile
STATUSES: tuple[str, ...] = get_args(Status)

_SERVER_BUSY = 503
ID_BYTES = 16  # random: recovery takes two records with one id for the same request, so there must never be two


def status_for(http_status: int) -> Status:
    """The word for a reply that went out whole."""
    if http_status < 400:
        return "ok"
    return "refused" if http_status < 500 or http_status == _SERVER_BUSY else "failed"


class Record:
    """Open from the first byte of a request to the last of its reply. Set attributes as facts become known."""

    __slots__ = (
        "_written", "adapter", "adapter_digest", "answer", "body", "cache", "chain_id", "client", "closed_ns", "closed_s",
        "endpoint", "error", "experiment", "finish_reason", "http_status", "id", "intent", "key_id", "media", "media_data",
        "model", "model_config",
        "opened_ns", "opened_s", "output", "packed", "previous_id", "request_id", "response_id", "route", "size_bytes",
        "status", "timings_ms", "unauthenticated", "unread", "usage", "warnings",
    )  # fmt: skip

    def __init__(
        self,
        written: Callable[[Record], None],
        endpoint: str,
        *,
        request_id: str | None = None,
        client: str | None = None,
        body: bytes | Mapping[str, Any] | None = None,
        unread: BodySummary | None = None,
    ) -> None:
        """`written` takes the record when it is closed."""
        self._written: Callable[[Record], None] | None = written
        self.id = random_hex(ID_BYTES)  # part of the file's name
        self.opened_ns = time.time_ns()  # since the epoch
        self.opened_s = time.monotonic()
        self.endpoint = endpoint  # the path of the request
        self.request_id = request_id or f"req-{self.id}"
        self.chain_id = self.id  # that of the first of the requests that go on from each other
        self.previous_id: str | None = None  # of the record that this one goes on from
        self.client = client  # address of the caller
        self.body = body  # the request, raw or parsed; not to be changed after it is set
        self.unread = unread  # in place of a body that was not read, or is not kept whole
        self.media: list[str] | None = None  # hashes of the files that are kept with it (`media_store.py`)
        self.media_data: dict[str, bytes] = {}  # by hash, until they are written
        self.unauthenticated = False  # refused before it was known who asked
        self.size_bytes = 0  # about what it holds in memory while it waits; the trail's
        self.intent: Any = None  # what keeps the record from being forgotten in a crash; the trail's
        self.packed: bytes | None = None  # its facts, ready to be sent to the process that writes; the writer's
        self.key_id: str | None = None
        self.model: str | None = None  # None: what the request or the answer says
        self.model_config: Mapping[str, Any] | None = None
        self.adapter: str | None = None  # its name
        self.adapter_digest: str | None = None  # SHA-256 of the content that computed the answer, if that is known
        self.cache: Mapping[str, Any] | None = None
        self.route: Mapping[str, Any] | None = None
        self.experiment: Mapping[str, Any] | None = None
        self.warnings: list[Any] | None = None
        self.timings_ms: dict[str, float] = {}  # queue, prefill, decode, ttft, ...
        self.closed_ns = 0
        self.closed_s = 0.0
        self.status: Status | None = None
        self.http_status: int | None = None
        self.answer: Answer | None = None
        self.output: Any = None
        self.usage: Mapping[str, Any] | None = None
        self.error: Any = None
        self.response_id: str | None = None
        self.finish_reason: str | None = None

    @property
    def is_open(self) -> bool:
        return self._written is not None

    def note(self, **facts: Any) -> None:
        """Set several attributes at once."""
        for name, value in facts.items():
            setattr(self, name, value)

    def close(
        self,
        status: Status,
        *,
        http_status: int | None = None,
        answer: Answer | None = None,
        output: Any = None,
        usage: Mapping[str, Any] | None = None,
        error: Any = None,
        response_id: str | None = None,
        finish_reason: str | None = None,
    ) -> None:
        """Hand the record over to be written. What is given here wins over what `answer` says. Only once."""
        written, self._written = self._written, None
        if written is None:
            raise InternalError(f"the audit record of {self.request_id} was closed twice: {self.status}, then {status}")
        self.closed_ns = time.time_ns()
        self.closed_s = time.monotonic()
        self.status = status
        self.http_status = http_status
        self.answer = answer
        self.output = output
        self.usage = usage
        self.error = error
        self.response_id = response_id
        self.finish_reason = finish_reason
        written(self)
