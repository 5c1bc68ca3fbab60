"""`ResponsesCall`: one POST /v1/responses on its way through the pipeline, as a chat.

Does: read the request and the conversation it continues, make the chat body, reshape the reply, have the response stored.
Does not: charge, route, cache or record; the pipeline does, as for chat.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest
from tonle.gateway.apis.chat_body import CHAT
from tonle.gateway.apis.responses.context import Context, ContextFinder, new_id
from tonle.gateway.apis.responses.input_items import Item, chat_messages, read_items
from tonle.gateway.apis.responses.reply import ResponseReply
from tonle.gateway.apis.responses.request import ReadRequest, chat_body, read_request
from tonle.gateway.apis.responses.resources import Resources
from tonle.gateway.apis.responses.response_object import new_response
from tonle.gateway.apis.responses.response_store import StoredResponse
from tonle.gateway.apis.responses.truncation import fitted
from tonle.gateway.call import Call, Outlet, ReplyFacts
from tonle.gateway.parsed_request import DecodedBody, ParsedRequest, add_warning

# Not stored, and not said to be: the caller did not ask, or was told.
_NO_STORE = (
    "not stored: this server has several front ends or response_store is off; send the whole conversation each time"
)


class ResponsesCall(Call):
    __slots__ = ("_context", "_input", "_owner", "_random_part", "_reply", "_request", "_resources")

    def __init__(self, exchange: Exchange, resources: Resources) -> None:
        super().__init__(exchange, CHAT)
        self._resources = resources
        self._random_part = new_id()
        self._owner = ""
        self._request: ReadRequest | None = None
        self._context = Context()
        self._input: list[Item] = []  # of this request, references replaced
        self._reply: ResponseReply | None = None

    async def prepare(self, owner: str) -> None:
        """Read the request, and from the store what it refers to. Raises `InvalidRequest`, `CapacityError`."""
        request = self._request = read_request(self.exchange.body)
        self._owner = owner
        store, exchange = self._resources.store, self.exchange
        finder = ContextFinder(
            store, owner, self._resources.max_bytes, lambda num_bytes: self._resources.reserve(exchange, num_bytes)
        )
        fields = request.fields
        items = read_items(fields.input, f"msg_{self._random_part}_in")
        if fields.previous_response_id is not None:
            self._context = await finder.previous(fields.previous_response_id)
        self._input = await finder.with_referred(items)
        if store is None and fields.store:
            add_warning(request.warnings, "store", _NO_STORE)

    def decode(self) -> DecodedBody:
        assert self._request is not None, "prepare comes first"
        request, fields = self._request, self._request.fields
        messages = chat_messages([*self._context.items, *self._input])
        if not messages:
            raise InvalidRequest("input is empty; send at least one message", param="input")
        body = chat_body(request, messages)
        if fields.truncation == "auto":
            fitted(body, self._resources.context_length(fields.model), request.warnings)
        self.continued_id = fields.previous_response_id
        noted = {"metadata": fields.metadata} if fields.metadata else {}  # for the record only
        return DecodedBody(body, msgspec.json.encode(body | noted), request.warnings, rewritten=bool(noted))

    def outlet(self, request: ParsedRequest | None, facts: ReplyFacts) -> Outlet:
        if request is None or self._request is None:
            return self.exchange
        stores = self._request.stores and self._resources.store is not None
        response = new_response(self._request, f"resp_{self._random_part}", stores=stores)
        self._reply = ResponseReply(self.exchange, response, self._note_id, self._save if stores else None)
        return self._reply

    def _note_id(self, response_id: str) -> None:
        self.answer_id = response_id

    async def complete(self) -> None:
        if self._reply is not None:
            await self._reply.complete()

    async def _save(self, response: dict[str, Any]) -> None:
        """Raises `TooLarge`, `StoreLost`."""
        store = self._resources.store
        assert store is not None
        given, output = msgspec.json.encode(self._input), msgspec.json.encode(response["output"])
        stored = StoredResponse(
            response=msgspec.json.encode({**response, "output": None}),
            input=given,
            output=output,
            chain=self._context.chain,
            context_bytes=self._context.num_bytes + len(given) + len(output),
        )
        await store.put(self._owner, response["id"], stored)
