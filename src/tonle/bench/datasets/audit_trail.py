"""Recorded requests of an audit trail, in the order in which they arrived.

Does: find them by the trail's index, a page at a time, and read each record when its turn comes, so that a day of them takes no
more memory than an hour; describe them for a simulation (`recorded_requests`). Does not: send (`replay_workload.py`) or verify.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from tonle.audit.export import read_records
from tonle.audit.index import Index, Query, Row, query_time
from tonle.audit.replay_records import path_of, request_of
from tonle.bench.workload import PATHS

PAGE_ROWS = 1000
MODEL_PATHS = (*PATHS.values(), "/v1/messages", "/v1/responses", "/api/chat", "/api/generate", "/api/v1/inference")
REPLAYED_PATHS = (*MODEL_PATHS, "/v1/embeddings")


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that reached the model, for a simulation."""

    record: str  # its id
    arrival_s: float  # after the first one
    prompt_tokens: int
    output_tokens: int
    text: str | None  # all that was said, in order; requests that begin alike share a prefix. None: it is not on record
    owner: str  # id of the caller's key; "" without keys


def rows_of(trail: Path, since: str | None = None, until: str | None = None) -> Iterator[Row]:
    """Lines of the index by time of arrival, from `since` up to `until`. Raises `NotFound` if there is no trail."""
    start, end = query_time(since) or "", query_time(until)
    with Index(trail) as index:
        limit, seen = PAGE_ROWS, set[tuple[str, str]]()
        while True:
            # Read at once: an open cursor would keep the index locked for others.
            rows = list(index.find(Query(since=start, until=end, limit=limit)))
            fresh = [row for row in rows if (row.day, row.file) not in seen]
            yield from fresh
            if len(rows) < limit:
                return
            begun, start = start, rows[-1].time or ""
            limit = PAGE_ROWS if start > begun else 2 * limit  # more than a page at one moment
            seen = {(row.day, row.file) for row in rows if row.time == start}


def read_row(trail: Path, row: Row, skipped: list[str]) -> dict[str, Any] | None:
    """The record of a line. None if it cannot be read: `skipped` says why."""
    return next(read_records([trail / row.day / row.file], skipped), None)


def seconds_of(time: str) -> float:
    """Of a record's time, since the epoch, with microseconds."""
    return datetime.fromisoformat(time).timestamp()


def recorded_requests(trail: Path, since: str | None = None, until: str | None = None) -> Iterator[RecordedRequest]:
    """Requests that the model answered, at least in part, with the counts that the server gave."""
    first_s: float | None = None
    skipped: list[str] = []
    for row in rows_of(trail, since, until):
        if row.status == "refused" or row.endpoint not in MODEL_PATHS or not row.prompt_tokens or row.time is None:
            continue
        record = read_row(trail, row, skipped)
        if record is None:
            continue
        moment_s = seconds_of(row.time)
        first_s = moment_s if first_s is None else first_s
        yield RecordedRequest(
            record=record["id"],
            arrival_s=moment_s - first_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=max(1, row.completion_tokens or 1),
            text=_text(record),
            owner=row.key_id or "",
        )


def _text(record: dict[str, Any]) -> str | None:
    body = request_of(record)
    if body is None:
        return None
    content = [body.get(name) for name in ("model", "system", "instructions", "tools", "messages", "prompt", "input")]
    if path_of(record) == "/api/v1/inference":
        content += [body.get(name) for name in ("system_prompt", "conversation_history", "user_input")]
    return "\n".join(_words(part) for part in content if part)


def _words(part: Any) -> str:
    """A text, or the roles and texts of messages."""
    if isinstance(part, str):
        return part
    if isinstance(part, list) and all(isinstance(each, dict) for each in part):
        return "\n".join(f"{each.get('role')}: {_content(each)}" for each in part)
    return msgspec.json.encode(part).decode()


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    told = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return told + (msgspec.json.encode(rest).decode() if rest else "")
