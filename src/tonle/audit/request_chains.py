"""Chains of requests in the index: an agent's loop, in which each request goes on from the answer before it.

A server that wrote both records noted the link in the later one (`previous_id`, `chain_id`). Where it could not, because it was
restarted, another gateway answered, or the trail is that of the middleware, the link is found here, from the ids of
tool calls and answers that the later request repeats. It leads to the last earlier record of the same key that gave them out.

Does: link a record that is being added to the index; find all records of a chain. Does not: change records, or count as evidence.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tonle.audit.seal import REMOVED
from tonle.errors import NotFound
from tonle.protocol.call_ids import drawn_ids, named_ids

SCHEMA = """
CREATE TABLE calls (call_id TEXT NOT NULL, record INTEGER NOT NULL);
CREATE INDEX by_call ON calls (call_id, record);
CREATE INDEX calls_of_record ON calls (record);
"""
_FIND_GIVER = """
SELECT records.id, records.chain_id FROM calls JOIN records ON records.rowid = calls.record
WHERE calls.call_id = ? AND records.key_id IS ? ORDER BY calls.record DESC LIMIT 1
"""


class Place(NamedTuple):
    chain_id: str | None
    previous_id: str | None


def place_of(database: sqlite3.Connection, record: dict[str, Any]) -> Place:
    """Where a record stands, by what it says, else by the ids it repeats."""
    own = _text(record.get("chain_id")) or _text(record.get("id"))  # records of older versions say nothing
    previous = _text(record.get("previous_id"))
    if previous is not None:
        # That record may have been linked to an earlier chain since.
        found = database.execute("SELECT chain_id FROM records WHERE id = ?", [previous]).fetchone()
        return Place(own if found is None else found[0], previous)
    key = record.get("key_id")
    if key != REMOVED:
        for call_id in named_ids(_request(record)):
            if (giver := database.execute(_FIND_GIVER, [call_id, _text(key)]).fetchone()) is not None:
                names_own = own != record.get("id")  # that of a session
                return Place(own if names_own else giver[1], giver[0])
    return Place(own, None)


def add_calls(database: sqlite3.Connection, rowid: int | None, record: dict[str, Any]) -> None:
    """The ids that its answer gave out."""
    rows = [(call_id, rowid) for call_id in dict.fromkeys(_given(record))]
    database.executemany("INSERT INTO calls (call_id, record) VALUES (?, ?)", rows)


def remove_calls(database: sqlite3.Connection, condition: str, values: Any) -> None:
    database.execute(f"DELETE FROM calls WHERE record IN (SELECT rowid FROM records WHERE {condition})", values)


def chain_ids(database: sqlite3.Connection, name: str) -> list[str]:
    """The chains of the records with that id, request id, response id or file name. Raises `NotFound`."""
    rows = database.execute(
        "SELECT DISTINCT chain_id FROM records WHERE chain_id = :it OR id = :it OR request_id = :it OR response_id = :it"
        " OR file = :it",
        {"it": Path(name).name},
    ).fetchall()
    if not rows:
        raise NotFound(f"no record has the id {name!r}")
    return [row[0] for row in rows]


def _request(record: dict[str, Any]) -> dict[str, Any]:
    """The parts of the body that may repeat ids."""
    parameters = record.get("parameters")
    previous = parameters.get("previous_response_id") if isinstance(parameters, dict) else None
    return {"messages": record.get("messages"), "input": record.get("prompt"), "previous_response_id": previous}


def _given(record: dict[str, Any]) -> Iterator[str]:
    response_id = _text(record.get("response_id"))
    if response_id is not None and response_id.startswith("resp"):  # no request names another answer by its id
        yield response_id
    for choice in _dicts(record.get("choices")):
        yield from drawn_ids(_dicts(choice.get("tool_calls")))
    output = record.get("output")
    if isinstance(output, dict):  # a reply of /v1/responses or /v1/messages, as it came
        for item in (*_dicts(output.get("output")), *_dicts(output.get("content"))):
            if item.get("type") in ("function_call", "tool_use"):
                yield from drawn_ids([{"id": item.get("call_id") or item.get("id"), "name": item.get("name")}])
        if isinstance(output.get("id"), str) and output.get("object") == "response":
            yield output["id"]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
