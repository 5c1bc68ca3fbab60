"""`TraceContext`: which trace a request belongs to, as W3C Trace Context writes it in `traceparent` and `tracestate`.

Does: read the two headers, begin a trace, write the headers for a backend. Does not: import OpenTelemetry, or decide which
requests are traced (`tracing.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tonle.protocol.random_ids import random_hex

PARENT_HEADER = "traceparent"
STATE_HEADER = "tracestate"

SAMPLED = 0x01  # the caller records this trace
RANDOM = 0x02  # its trace id is random (level 2 of the specification)

# version, trace id, span id of the caller, flags. A version after 00 may have more, behind another dash.
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII | re.DOTALL)
_NO_TRACE = "0" * 32
_NO_SPAN = "0" * 16
_INVALID_VERSION = "ff"

# One entry of `tracestate`: a key, or a tenant's key at a vendor's; the value has no comma or equals sign and does not end
# with a space.
_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_ENTRY = re.compile(rf"({_KEY})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]", re.ASCII)
MAX_ENTRIES = 32
MAX_STATE_CHARS = 512  # that are passed on
LONG_ENTRY_CHARS = 128  # if that is too much, entries longer than this are left out first


class TraceContext(msgspec.Struct, frozen=True):
    """Ids are lower-case hex digits."""

    trace_id: str  # 32 digits
    span_id: str  # 16 digits, of this server's span; empty: it has none, and passes the caller's headers on unchanged
    parent_id: str  # 16 digits, of the caller's span; empty: the trace begins here
    sampled: bool  # the trace is recorded
    state: str = ""  # `tracestate` of other vendors, passed on
    is_random: bool = False  # the trace id is

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> TraceContext | None:
        """The caller's; None if it sends none, or one that breaks the rules, which is to be ignored. Names in lower case."""
        text = headers.get(PARENT_HEADER)
        if text is None or (found := _PARENT.fullmatch(text.strip(" \t"))) is None:
            return None
        version, trace_id, parent_id, flags, more = found.groups()
        if version == _INVALID_VERSION or trace_id == _NO_TRACE or parent_id == _NO_SPAN:
            return None
        if version == "00" and more is not None:
            return None
        bits, state = int(flags, 16), headers.get(STATE_HEADER)
        return cls(
            trace_id, "", parent_id, bool(bits & SAMPLED), _passed_on(state) if state else "", bool(bits & RANDOM)
        )

    @classmethod
    def begin(cls, *, sampled: bool) -> TraceContext:
        """A trace that begins at this server."""
        return cls(_new_id(16), new_span_id(), "", sampled, is_random=True)

    def joined(self) -> TraceContext:
        """The caller's trace with a span of this server in it."""
        return msgspec.structs.replace(self, span_id=new_span_id())

    @property
    def is_recorded(self) -> bool:
        """This server tells a collector about it."""
        return self.sampled and self.span_id != ""

    def headers(self, span_id: str = "") -> dict[str, str]:
        """For a request that belongs to it. `span_id`: of the span that sends it, if that is not this server's own."""
        flags = (SAMPLED if self.sampled else 0) | (RANDOM if self.is_random else 0)
        parent = f"00-{self.trace_id}-{span_id or self.span_id or self.parent_id}-{flags:02x}"
        return {PARENT_HEADER: parent, STATE_HEADER: self.state} if self.state else {PARENT_HEADER: parent}


def new_span_id() -> str:
    return _new_id(8)


def _new_id(num_bytes: int) -> str:
    """Not all zeros, which means that there is no id."""
    while not (drawn := random_hex(num_bytes)).strip("0"):
        pass
    return drawn


def _passed_on(text: str) -> str:
    """`tracestate` within its limits; empty if an entry is malformed, which makes all of it invalid."""
    entries = [entry for part in text.split(",") if (entry := part.strip(" \t"))]
    keys = [found.group(1) for entry in entries if (found := _ENTRY.fullmatch(entry)) is not None]
    if len(keys) != len(entries) or len(set(keys)) != len(keys) or len(keys) > MAX_ENTRIES:
        return ""
    if _size(entries) > MAX_STATE_CHARS:
        entries = [entry for entry in entries if len(entry) <= LONG_ENTRY_CHARS]
        while _size(entries) > MAX_STATE_CHARS:
            entries.pop()  # the newest are first
    return ",".join(entries)


def _size(entries: list[str]) -> int:
    return sum(map(len, entries)) + max(0, len(entries) - 1)
