"""`ResponsesApi`: the handlers of /v1/responses and of what is below it.

Does: make the call that the pipeline runs; read, list and delete what is stored. Does not: check keys (`routes.py` does).
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

import msgspec

from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest
from tonle.gateway.apis.responses.call import ResponsesCall
from tonle.gateway.apis.responses.context import is_response_id, not_found
from tonle.gateway.apis.responses.request import PATH
from tonle.gateway.apis.responses.resources import Resources
from tonle.gateway.apis.responses.response_store import StoredResponse
from tonle.gateway.auth import owner_of
from tonle.gateway.call import Call

PREFIX = f"{PATH}/"
INPUT_ITEMS = "/input_items"
DEFAULT_LIMIT, MAX_LIMIT = 20, 100


class ResponsesApi:
    def __init__(self, resources: Resources, *, trust_salt: bool) -> None:
        """`trust_salt`: X-Tonle-Salt of the caller, a gateway, says whose responses these are."""
        self.resources = resources
        self._trust_salt = trust_salt

    def call(self, exchange: Exchange) -> Call:
        return ResponsesCall(exchange, self.resources)

    async def retrieve(self, exchange: Exchange) -> None:
        response_id = exchange.path.removeprefix(PREFIX)
        if _query(exchange).get("stream") == "true":
            raise InvalidRequest("stream cannot be served: only a response that is being computed has a stream, and only "
                                 "for the request that made it", param="stream")  # fmt: skip
        stored = await self._stored(exchange, response_id)
        exchange.reply(msgspec.json.encode(_whole(stored)))

    async def delete(self, exchange: Exchange) -> None:
        response_id, store = exchange.path.removeprefix(PREFIX), self.resources.store
        is_one = store is not None and is_response_id(response_id)
        if not is_one or store is None or not await store.delete(self._owner(exchange), response_id):
            raise not_found(response_id)
        exchange.reply(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))

    async def input_items(self, exchange: Exchange) -> None:
        """Those of the request itself, not of the responses it continues."""
        query = _query(exchange)
        limit, order, after = _limit(query.get("limit")), query.get("order", "desc"), query.get("after")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", param="order")
        stored = await self._stored(exchange, exchange.path.removeprefix(PREFIX).removesuffix(INPUT_ITEMS))
        items: list[dict[str, Any]] = msgspec.json.decode(stored.input)
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidRequest(f"after: this response has no input item {after[:100]!r}", param="after")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
        listed = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > limit}
        exchange.reply(msgspec.json.encode(listed))

    async def _stored(self, exchange: Exchange, response_id: str) -> StoredResponse:
        """Raises `NotFound`; for another tenant's too."""
        store = self.resources.store
        found = None
        if store is not None and is_response_id(response_id):
            found = await store.get(self._owner(exchange), response_id)
        if found is None:
            raise not_found(response_id)
        return found

    def _owner(self, exchange: Exchange) -> str:
        return owner_of(exchange, exchange.key, trust_salt=self._trust_salt)


def _whole(stored: StoredResponse) -> dict[str, Any]:
    response: dict[str, Any] = msgspec.json.decode(stored.response)
    return response | {"output": msgspec.Raw(stored.output)}


def _query(exchange: Exchange) -> dict[str, str]:
    try:
        return {name: values[-1] for name, values in parse_qs(exchange.query, max_num_fields=32).items()}
    except ValueError:
        raise InvalidRequest("the query of the URL has too many fields") from None


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not text.isascii() or not text.isdecimal() or len(text) > 4 or not 1 <= int(text) <= MAX_LIMIT:
        raise InvalidRequest(f"limit must be 1 to {MAX_LIMIT}", param="limit")
    return int(text)
