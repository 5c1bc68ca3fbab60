"""`explain`: where one request's time went, as spans that add up to it and as sentences.

Does: put together what the gateway saw (`SeenRequest`) and what the engine told (`TimeSpent`); decide how other requests are
named. Does not: ask a backend, or check who asks (`gateway/explain_page.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tonle.observe.seen_request import SeenRequest
from tonle.observe.sentences import sentences_of
from tonle.observe.span_details import detail_of
from tonle.observe.spans import Span, spans_of
from tonle.telemetry.time_spent import OtherPrompt, TimeSpent

ANOTHER_REQUEST, ANOTHER_KEY = "another request", "another key"
_NO_KEY = "anonymous"  # the id of the caller's key where there are no keys

Names = Callable[[int], str | None]  # the id of the request with this handle; None: not known
Find = Callable[[str], SeenRequest | None]  # a request that has ended, by its id


class Explanation(msgspec.Struct, frozen=True):
    """`spans` tile 0..`total_s`; the most important sentence comes first, and there is at least one."""

    id: str
    total_s: float
    spans: list[Span]
    sentences: list[str]


def explain(
    seen: SeenRequest,
    spent: TimeSpent | None,
    *,
    names: Names = lambda handle: None,
    shows_keys: bool = False,
    find: Find = lambda request_id: None,
) -> Explanation:
    """`shows_keys`: the reader may know the keys, and the requests, of others."""

    def who(other: OtherPrompt) -> str:
        return _whose(seen, names(other.handle) if other.handle else None, find, shows_keys=shows_keys)

    spans = [msgspec.structs.replace(span, detail=detail_of(span.name, seen, spent)) for span in spans_of(seen, spent)]
    return Explanation(seen.id, max(0.0, seen.total_s), spans, sentences_of(seen, spent, spans, who))


def visible_id(seen: SeenRequest, request_id: str | None, find: Find, *, shows_keys: bool) -> str | None:
    """The id of another request, if the reader of an explanation of `seen` may know it."""
    if request_id is None or shows_keys:
        return request_id
    other = find(request_id)
    return request_id if other is not None and _same_owner(seen, other) else None


def _whose(seen: SeenRequest, request_id: str | None, find: Find, *, shows_keys: bool) -> str:
    if request_id is None:
        return ANOTHER_REQUEST
    other = find(request_id)
    if shows_keys:
        has_key = other is not None and other.key_id not in ("", _NO_KEY)
        name = f"key {other.key_name or other.key_id}" if other is not None and has_key else ANOTHER_REQUEST
        return f"{name} ({request_id})"
    if other is not None and _same_owner(seen, other):
        return f"the same {'key' if other.key_id == seen.key_id else 'tenant'} ({request_id})"
    return ANOTHER_REQUEST if other is None or other.key_id == _NO_KEY else ANOTHER_KEY


def _same_owner(seen: SeenRequest, other: SeenRequest) -> bool:
    """Without keys all requests have one owner, and may still be of different people."""
    return bool(seen.owner) and seen.owner == other.owner and seen.key_id != _NO_KEY
