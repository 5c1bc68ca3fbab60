"""`GET /v1/requests/{id}/explain`: where one request's time went, for those who may know.

Does: find the request, check that the caller may see it, ask the backend that answered for its engine's part, name other
requests as far as the caller may know them. Does not: explain (`observe/explain.py`).

A gateway sends requests on under their own id (`X-Request-Id`), to each backend that it tries: so the one that answered knows
it by the same id. Of several answers to one request (`n`, several prompts) the engine tells of the slowest.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import UpstreamError
from tonle.edge.exchange import Exchange
from tonle.gateway.api_keys.key import Key
from tonle.gateway.auth import owner_of
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.transport import SALT_HEADER
from tonle.gateway.refusals import Forbidden, UnknownRequest
from tonle.gateway.routing.router import salt_of
from tonle.gateway.services import Services
from tonle.observe.engine_facts import EngineFacts, facts_of, told_by
from tonle.observe.explain import Explanation, Names, explain, visible_id
from tonle.observe.request_log import RequestLog
from tonle.observe.request_row import row_of
from tonle.observe.seen_request import SeenRequest
from tonle.protocol.replies import UNREADABLE
from tonle.telemetry.time_spent import TimeSpent

PREFIX, SUFFIX = "/v1/requests/", "/explain"
PATTERN = f"{PREFIX}{{id}}{SUFFIX}"
ASK_S = 2.0  # that a backend is given
MAX_ASK_BYTES = 256 * 1024  # of what it replies
MAX_ASKING = 4  # questions to backends at once; more wait
MAX_SHOWN_ID = 128  # letters, in a message
ANSWER_PREFIXES = ("chatcmpl", "cmpl")  # of the `id` of a completion; behind it stands the request's
NOTHING_KEPT = (
    "this server remembers no requests: it has several front ends, and none of them sees all; put `tonle gateway` in front "
    "of it, which does"
)


class BackendReply(msgspec.Struct, frozen=True):
    """What is read of a backend's own explanation."""

    engine: EngineFacts | None = None


class EnginePart(NamedTuple):
    """What is known of the time in the engine. `note`: why that is less than it could be."""

    spent: TimeSpent | None
    names: Names
    note: str = ""


class ExplainPage:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._asking = asyncio.Semaphore(MAX_ASKING)

    async def reply(self, exchange: Exchange) -> None:
        key = self._admit(exchange)
        request_id = exchange.path.removeprefix(PREFIX).removesuffix(SUFFIX)
        log = self._log()
        found_by = (log.find(name, lambda each: self._may_see(exchange, key, each)) for name in _names_of(request_id))
        seen = next((each for each in found_by if each is not None), None)
        if seen is None:
            raise _not_found(request_id, log)
        part, shows_keys = await self._engine_part(seen), key.may("dashboard")
        engine = None
        if part.spent is not None:
            engine = facts_of(part.spent, lambda handle: self._shown_id(key, seen, part.names(handle)))
        row = row_of(seen)
        if not shows_keys and seen.key_id != key.id:  # of the same tenant
            row |= {"key": "", "key_id": ""}
        found = self._explained(seen, part, shows_keys=shows_keys)
        body = {
            "object": "request.explanation", "id": found.id, "total_s": found.total_s, "spans": found.spans,
            "sentences": found.sentences, "engine": engine, "request": row,
        }  # fmt: skip
        exchange.reply(msgspec.json.encode(body))

    async def explanation(self, seen: SeenRequest) -> Explanation:
        """For a reader who may see all: the dashboard's."""
        return self._explained(seen, await self._engine_part(seen), shows_keys=True)

    def _explained(self, seen: SeenRequest, part: EnginePart, *, shows_keys: bool) -> Explanation:
        found = explain(seen, part.spent, names=part.names, shows_keys=shows_keys, find=self._prompt_of)
        return msgspec.structs.replace(found, sentences=[*found.sentences, part.note]) if part.note else found

    # -- who may see it

    def _admit(self, exchange: Exchange) -> Key:
        """A key that may use models, or one that may see the dashboard. Raises `Unauthorized`, `Forbidden`."""
        auth = self._services.auth
        try:
            auth.admit(exchange, "models")
        except Forbidden:
            auth.admit(exchange, "dashboard")
        key: Key = exchange.key
        return key

    def _may_see(self, exchange: Exchange, key: Key, seen: SeenRequest) -> bool:
        """Its own, its tenant's, or all. `X-Tonle-Salt` of a trusted gateway says whose request it asks about: others of its
        key are those of other callers, who may have chosen the same id."""
        owner = owner_of(exchange, key, trust_salt=self._services.trust_salt)
        if owner != key.owner:
            return seen.owner == owner
        return key.may("dashboard") or seen.key_id == key.id or (bool(seen.owner) and seen.owner == owner)

    def _shown_id(self, key: Key, seen: SeenRequest, request_id: str | None) -> str | None:
        """The id of another request, if the caller may know it.

        With `trust_salt` the caller is a gateway: all requests under its key are its own, whose ever they are there, and it
        decides what its callers may know.
        """
        shows_keys = key.may("dashboard")
        if request_id is None or shows_keys or not self._services.trust_salt:
            return visible_id(seen, request_id, self._prompt_of, shows_keys=shows_keys)
        other = self._prompt_of(request_id)
        is_its_own = not self._services.auth.has_keys if other is None else other.key_id == key.id
        return request_id if is_its_own else None

    def _prompt_of(self, request_id: str) -> SeenRequest | None:
        """One that an engine has computed: others may have been refused under the same id since."""
        return self._log().find(request_id, lambda each: each.sent_s is not None)

    # -- what is known

    def _log(self) -> RequestLog:
        """Raises `UnknownRequest` if nothing is remembered."""
        if self._services.observed is None:
            raise UnknownRequest(NOTHING_KEPT)
        return self._services.observed.request_log

    async def _engine_part(self, seen: SeenRequest) -> EnginePart:
        request_of = self._services.request_of
        if seen.is_local or seen.sent_s is None:
            return EnginePart(seen.spent, request_of or _no_name)
        backend = self._backend(seen.backend)
        if backend is None or backend.kind != "tonle":
            return EnginePart(None, _no_name)
        latest = self._log().find(seen.id, lambda each: each.backend == seen.backend)
        if latest is not None and latest.number != seen.number:  # the backend may tell of that one, whosever it is
            return EnginePart(
                None, _no_name, f"{backend.name} had a later request with this id: its part is not known."
            )
        return await self._ask(backend, seen)

    def _backend(self, name: str) -> Backend | None:
        return next((backend for backend in self._services.pool.backends if backend.name == name), None)

    async def _ask(self, backend: Backend, seen: SeenRequest) -> EnginePart:
        """A Tonle server for its part, with the key that the gateway has for it."""
        headers = {}
        if seen.owner:
            headers[SALT_HEADER] = salt_of(seen.owner, self._services.pipeline.salt_secret)
        answer = BufferedReply(max_bytes=MAX_ASK_BYTES)
        try:
            async with asyncio.timeout(ASK_S), self._asking:
                await backend.send("GET", f"{PREFIX}{seen.id}{SUFFIX}", b"", headers, answer, first_s=ASK_S)
        except (UpstreamError, TimeoutError):
            return EnginePart(None, _no_name, f"{backend.name} could not be asked for its part of this request.")
        if answer.status != 200:
            return EnginePart(None, _no_name, _untold(backend, answer.status))
        try:
            engine = msgspec.json.decode(answer.body, type=BackendReply).engine
        except UNREADABLE:
            return EnginePart(None, _no_name, f"What {backend.name} tells of this request cannot be read.")
        if engine is None:
            return EnginePart(None, _no_name)
        told = told_by(engine)
        return EnginePart(told.spent, told.ids.get)


def _no_name(handle: int) -> None:
    return None


def _untold(backend: Backend, status: int) -> str:
    if status == 404:
        return f"{backend.name} does not remember this request, so its part is told as seen from here."
    if status in (401, 403):
        return f"{backend.name} does not tell its part: the api_key it is asked with here may not see this request."
    return f"{backend.name} could not be asked for its part of this request (status {status})."


def _names_of(given: str) -> list[str]:
    """The id itself, and if it is that of an answer, those of requests whose answers of Tonle and vLLM have it."""
    prefix, dash, own = given.partition("-")
    return [given, f"req-{own}", own] if dash and prefix in ANSWER_PREFIXES else [given]


def _not_found(request_id: str, log: RequestLog) -> UnknownRequest:
    """The same for a request that is not there and for one that is not the caller's."""
    shown = request_id.encode("unicode_escape").decode()[:MAX_SHOWN_ID]
    return UnknownRequest(
        f"there is no request {shown!r} of yours among the {len(log):,} that this server remembers: it keeps the last "
        f"{log.most:,}, forgets them when it restarts, and knows a request once it has ended; the id is the header "
        "X-Request-Id of its reply, or the `id` of a completion"
    )
