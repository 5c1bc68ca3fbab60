"""The conversation that a request continues: the items of earlier responses, and those it refers to, from the store.

Does: find them within bounds: so many responses, so many bytes. Does not: keep or translate them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from tonle.errors import InvalidRequest, NotFound
from tonle.gateway.apis.responses.input_items import Item
from tonle.gateway.apis.responses.response_store import Items, ResponseStore

MAX_CHAIN = 256  # responses that one continues
MAX_REFERRED = 64  # responses whose items one request refers to
ID_BYTES = 24  # drawn by `secrets`: on a server without keys, an id is all that is needed to read a response
_RESPONSE_ID = re.compile(rf"resp_[0-9a-f]{{{2 * ID_BYTES}}}")
_ITEM_ID = re.compile(rf"[a-z]+_([0-9a-f]{{{2 * ID_BYTES}}})_(?:in)?[0-9]+")

NO_STORE = (
    "this server stores no responses, because it has several front ends or response_store is off; send the whole conversation "
    "as input, or have the server started with --response-store redis://HOST:6379/0 (or behind `tonle gateway`)"
)


class PreviousNotFound(InvalidRequest):
    code = "previous_response_not_found"


class Context(msgspec.Struct):
    """What comes before a request's own input."""

    chain: tuple[str, ...] = ()  # ids of responses, oldest first
    items: list[Item] = []
    num_bytes: int = 0  # of their JSON


def new_id() -> str:
    """The random part of a response's id. The ids of its items have it too, so that an item leads to its response."""
    return secrets.token_hex(ID_BYTES)


def is_response_id(text: str) -> bool:
    return _RESPONSE_ID.fullmatch(text) is not None


def not_found(response_id: str) -> NotFound:
    return NotFound(f"there is no response {response_id[:100]!r}: it was never stored, was deleted, or has expired")


class ContextFinder:
    """`reserve` is told how many bytes a request will take, before they are read; it raises if there is no room."""

    def __init__(self, store: ResponseStore | None, owner: str, max_bytes: int, reserve: Callable[[int], None]) -> None:
        self._store = store
        self._owner = owner
        self._max_bytes = max_bytes
        self._reserve = reserve

    async def previous(self, response_id: str) -> Context:
        """The whole conversation up to and with this response, in at most two trips. Raises `InvalidRequest`."""
        param = "previous_response_id"
        if self._store is None:
            raise InvalidRequest(f"{param} cannot be served: {NO_STORE}", param=param)
        found = await self._store.get(self._owner, response_id) if is_response_id(response_id) else None
        if found is None:
            raise PreviousNotFound(f"{param}: {not_found(response_id).message}", param=param)
        if len(found.chain) >= MAX_CHAIN:
            raise InvalidRequest(f"{param}: this conversation has {MAX_CHAIN} responses, and more are not followed; begin a "
                                 "new one, with a summary as input", param=param)  # fmt: skip
        if found.context_bytes > self._max_bytes:
            raise InvalidRequest(f"{param}: this conversation has {found.context_bytes} bytes, more than max_body "
                                 f"({self._max_bytes}); begin a new one, with a summary as input", param=param)  # fmt: skip
        self._reserve(found.context_bytes)
        earlier = await self._store.get_items(self._owner, found.chain) if found.chain else []
        if None in earlier:
            gone = found.chain[earlier.index(None)]
            raise PreviousNotFound(f"{param}: it continues {gone}, which was deleted or has expired; send the whole "
                                   "conversation as input", param=param)  # fmt: skip
        every = [*(items for items in earlier if items is not None), Items(found.input, found.output)]
        items = [item for each in every for item in _decoded(each)]
        return Context((*found.chain, response_id), items, found.context_bytes)

    async def with_referred(self, items: list[Item]) -> list[Item]:
        """Each item reference replaced by its item. Raises `InvalidRequest`."""
        places = [place for place, item in enumerate(items) if item["type"] == "item_reference"]
        if not places:
            return items
        if self._store is None:
            raise InvalidRequest(f"an item_reference cannot be served: {NO_STORE}", param="input")
        known: dict[str, dict[str, Item]] = {}  # id of a response -> its items
        num_bytes, items = 0, list(items)
        for place in places:
            item_id = items[place]["id"]
            response_id = f"resp_{match[1]}" if (match := _ITEM_ID.fullmatch(item_id)) else ""
            if response_id and response_id not in known:
                (found,) = await self._store.get_items(self._owner, [response_id])
                num_bytes += 0 if found is None else len(found.input) + len(found.output)
                if num_bytes > self._max_bytes or len(known) >= MAX_REFERRED:
                    raise InvalidRequest(
                        "input refers to items of too many responses; send them themselves", param="input"
                    )
                known[response_id] = {} if found is None else {item["id"]: item for item in _decoded(found)}
            if (referred := known.get(response_id, {}).get(item_id)) is None:
                raise InvalidRequest(f"input[{place}] refers to {item_id[:100]!r}, which is not stored here",
                                     param=f"input[{place}].id")  # fmt: skip
            items[place] = referred
        self._reserve(num_bytes)
        return items


def _decoded(items: Items) -> list[dict[str, Any]]:
    return [*msgspec.json.decode(items.input), *msgspec.json.decode(items.output)]
