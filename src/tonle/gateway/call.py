"""`Call`: one generation request as it arrived, and where its reply goes.

Does: name the path that a backend is asked for, have the body read, choose the shape of the reply. Does not: change
while it is served: what the stages find is in `stage_results.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tonle.edge.exchange import Exchange
from tonle.gateway.api_keys.key import Key
from tonle.gateway.parsed_request import NOT_COMPUTED, DecodedBody, ParsedRequest, parse_request
from tonle.protocol.parse import decode_object


class Outlet(Protocol):
    """Takes the reply. The caller's exchange is one; APIs that are translated, and reshape replies, have others."""

    def reply(
        self, body: bytes, *, status: int = 200, content_type: str = ..., headers: Iterable[tuple[str, str]] = ()
    ) -> None: ...
    def start(self, *, status: int = 200, content_type: str, headers: Iterable[tuple[str, str]] = ()) -> None: ...
    def write(self, piece: bytes) -> None: ...
    def end(self) -> None: ...


class ReplyFacts:
    """What a reply says about itself, in headers or in its metadata, as far as it is known when it begins."""

    __slots__ = (
        "backend",
        "cache_state",
        "chain_id",
        "fallback",
        "is_local",
        "kv_blocks",
        "passed",
        "pool",
        "queued_s",
        "region",
    )

    def __init__(self) -> None:
        self.cache_state = "bypass"  # hit | miss | bypass
        self.backend = ""  # empty: none was asked
        self.is_local = False  # that backend is the engine in this process, and the only one
        self.pool = ""  # the worker pool of it that answers, as the reply's head told; empty: none, or not known yet
        self.queued_s = 0.0
        self.kv_blocks = ""  # of its prompt, as a replica tells (`protocol/kv_blocks.py`); not for callers
        self.fallback = ""  # the model that answers in place of the one asked for
        self.region: str | None = None  # of that backend
        self.passed: Iterable[str] = ()  # gateways, if another gateway asks
        self.chain_id = ""  # of the requests that this one goes on from; empty: there is no trail to find it in


class Call:
    """A request for one of a backend's own paths."""

    __slots__ = ("answer_id", "continued_id", "exchange", "path", "request_id")

    def __init__(self, exchange: Exchange, path: str) -> None:
        self.exchange = exchange
        self.path = path  # what a backend is asked for
        self.request_id = exchange.request_id
        # Of an API that has such ids: the earlier answer that the request names, and the name of the answer to this one.
        self.continued_id: str | None = None
        self.answer_id: str | None = None

    @property
    def computed(self) -> bool:
        """False: no model runs for it. It costs no time of a device, and says nothing about speed."""
        return self.path not in NOT_COMPUTED

    async def prepare(self, owner: str) -> None:
        """Fetch what the body refers to, before it is read. `owner`: whose stored things it may see. Raises `TonleError`."""

    def read(self, key: Key, *, strict: bool, trust_router: bool = False) -> ParsedRequest:
        """`strict` is the gateway's setting; a header may ask for it too. Raises `InvalidRequest`."""
        return parse_request(self.decode(), self.exchange, self.path, key, strict=strict, trust_router=trust_router)

    def decode(self) -> DecodedBody:
        """The body as a backend's endpoint expects it. Raises `InvalidRequest`."""
        raw = self.exchange.body
        return DecodedBody(decode_object(raw), raw)

    def outlet(self, request: ParsedRequest | None, facts: ReplyFacts) -> Outlet:
        """Where the backend's reply is written. `request` is None if it could not be read."""
        return self.exchange

    async def complete(self) -> None:
        """Called when the answer was written to the outlet: what must happen before its last byte leaves. Raises nothing."""
