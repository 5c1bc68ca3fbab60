"""Open audit, close audit: the results of the stages into a record. The only file that knows both.

Does: translate. Does not: write, or decide how a request ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tonle.audit.body_summary import BodySummary, summary_of
from tonle.audit.record import Record, Status, status_for
from tonle.audit.trail import AuditTrail
from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.unread_body import UnreadBody
from tonle.gateway.api_keys.key import LOCAL_CALLER
from tonle.gateway.call import Call
from tonle.gateway.chains import Chains, Link, session_chain
from tonle.gateway.parsed_request import ParsedRequest
from tonle.gateway.recorded_media import MediaNotes
from tonle.gateway.stage_results import AcceptedRequest, ResolvedModel, ShadowCopy, StageResults, as_fields
from tonle.protocol.answers import Answer, Collector
from tonle.protocol.call_ids import given_ids, named_ids
from tonle.protocol.media_paths import WORKERS, is_media
from tonle.protocol.multipart import is_form

MS = 1000.0
ROOM_S = 10.0  # the longest wait for the writer of records; then `admit` decides
LOOK_S = 0.005  # how often it is looked for
SESSION_HEADER = "x-session-id"  # a caller's own name for requests that belong together
MAX_SESSION_CHARS = 256


class Recorder:
    """With no trail there are no records, and every method does nothing."""

    def __init__(self, trail: AuditTrail | None) -> None:
        self._trail = trail
        self._chains = Chains()
        self._crowd: asyncio.Task[None] | None = None  # ends when there is room again

    async def room(self) -> None:
        """Returns at once, unless records come faster than they can be written: then callers wait for the writer."""
        trail = self._trail
        if trail is None or not trail.crowded:
            return
        if self._crowd is None or self._crowd.done():
            self._crowd = asyncio.create_task(_until_room(trail))
        await asyncio.wait({self._crowd}, timeout=ROOM_S)

    def admit(self) -> None:
        """Raises `CapacityError` if records cannot be kept and requests must then be refused."""
        if self._trail is not None:
            self._trail.admit()

    def open(self, call: Call, request: ParsedRequest | None) -> Record | None:
        """`request` is None if it could not be read; then the record has the body as it arrived."""
        if self._trail is None:
            return None
        exchange = call.exchange
        body: bytes | None = exchange.body if request is None else request.raw
        unread, notes = None, None
        if request is None and body and is_form(exchange.header("content-type")):  # what cannot be read is not kept
            unread, body = _of_form(summary_of(body, len(body))), None
        elif request is not None and is_media(call.path):
            notes = MediaNotes(hashes=self.wants_of_media[0], keeps=self.wants_of_media[1])
            body = notes.form(request) if request.form is not None else _described(notes, call.path, request)
        record = self._trail.open(
            exchange.path, request_id=call.request_id, client=exchange.client or None, body=body, unread=unread
        )
        if notes is not None:
            record.media_data = notes.kept
        return record

    @property
    def wants_of_media(self) -> tuple[bool, bool]:
        """Whether records have the hashes of media, and whether media is kept."""
        media = "none" if self._trail is None else self._trail.options.media
        return media != "none", media == "store"

    def link(self, record: Record | None, accepted: AcceptedRequest) -> str:
        """Note which earlier request this one goes on from. Returns the id of their chain; empty if there is no trail."""
        if record is None:
            return ""
        call, owner = accepted.call, accepted.owner
        ids = named_ids(accepted.request.body)
        if call.continued_id is not None:
            ids.insert(0, call.continued_id)
        session = call.exchange.header(SESSION_HEADER)[:MAX_SESSION_CHARS]
        if session:
            ids.append(f"{SESSION_HEADER}: {session}")
        if ids and (link := self._chains.find(owner, ids)) is not None:
            record.previous_id, record.chain_id = link
        if session:
            record.chain_id = session_chain(owner, session)
            self._chains.note(owner, ids[-1:], Link(record.id, record.chain_id))
        return record.chain_id

    def note_calls(self, record: Record, owner: str, answer: Answer) -> None:
        """Before the end of an answer leaves: the request with a tool's result may be here before the record is closed."""
        self._chains.note(owner, given_ids(answer), Link(record.id, record.chain_id))

    def close(
        self,
        record: Record | None,
        call: Call,
        results: StageResults,
        status: Status,
        answer: Answer,
        *,
        error: dict[str, Any] | None = None,
        made: bytes | None = None,
    ) -> None:
        """`made`: the answer, if it is media of which a copy was kept."""
        if record is None:
            return
        exchange = call.exchange
        request, model, lookup = results.request, results.model, results.lookup
        if exchange.unread is not None:  # only now is it known how much of it came
            record.unread = _summary(exchange.unread)
            if is_form(exchange.header("content-type")):
                record.unread = _of_form(record.unread)
        # Refused before its caller was known: at its head, or, on a server without keys, because of its body.
        record.unauthenticated = request is None and results.key is LOCAL_CALLER
        record.key_id = results.key.id
        if request is not None:
            record.model = request.asked_model if model is None else model.asked
            record.warnings = [f"{warning.param}: {warning.message}" for warning in request.warnings] or None
        if model is not None:
            _note_model(record, model)
            record.adapter_digest = results.adapter_digest
        cached_from = None if lookup.response is None else lookup.response.request_id
        record.cache = {"state": lookup.state, "request_id": cached_from}
        record.route = _route(results)
        record.timings_ms.update(_timings(exchange.arrived_s, results, answer))
        if is_media(call.path):
            self._note_media(record, call, results, status, answer, made)
        if answer.cut:
            record.warnings = [
                *(record.warnings or ()),
                "the answer is longer than a record may be: its rest is left out",
            ]
        if results.owner is not None:
            ids = given_ids(answer) + ([] if call.answer_id is None else [call.answer_id])
            self._chains.note(results.owner, ids, Link(record.id, record.chain_id))
        record.close(
            status, http_status=exchange.status or None, answer=answer, error=error, response_id=call.answer_id
        )

    def _note_media(
        self, record: Record, call: Call, results: StageResults, status: Status, answer: Answer, made: bytes | None
    ) -> None:
        hashes, keeps = self.wants_of_media
        notes = MediaNotes(hashes=hashes, keeps=keeps)
        answer.raw = notes.json(call.path, answer.raw)
        notes.made(made, answer.raw)
        record.media_data = {} if status == "refused" else record.media_data | notes.kept  # nothing was computed
        record.media = list(record.media_data) or None
        used = results.used_media
        if used.audio_s:
            answer.usage = {**(answer.usage or {}), "audio_seconds": round(used.audio_s, 3)}
        if used.characters:
            answer.usage = {**(answer.usage or {}), "characters": used.characters}
        if used.images:
            answer.usage = {**(answer.usage or {}), "images": used.images}

    def open_copy(
        self, accepted: AcceptedRequest, copy: ShadowCopy, body: bytes
    ) -> Callable[[BufferedReply, Exception | None], None] | None:
        """A record of its own for a copy. Returns the function that closes it, once."""
        if self._trail is None:
            return None
        call = accepted.call
        record = self._trail.open(call.path, request_id=copy.request_id, client=call.exchange.client or None, body=body)
        began_s = time.monotonic()
        record.key_id = accepted.key.id
        record.route = {**as_fields(copy), "why": "shadow", "shadow_of": call.request_id}

        def close(answer: BufferedReply, failure: Exception | None) -> None:
            collector = Collector(answer.headers.get("content-type"))
            collector.feed(answer.body)
            status: Status = "interrupted"  # the gateway was stopped meanwhile
            if answer.status or failure is not None:
                status = "failed" if failure is not None else status_for(answer.status)
            error = None if failure is None else {"code": type(failure).__name__, "message": str(failure)}
            record.timings_ms["total"] = (time.monotonic() - began_s) * MS
            record.close(status, http_status=answer.status or None, answer=collector.finish(), error=error)

        return close


def _described(notes: MediaNotes, path: str, request: ParsedRequest) -> bytes:
    """The body, with base64 described; as it came if there is none."""
    described = notes.json(path, request.body) if path.startswith(WORKERS) else request.body
    return request.raw if described is request.body else msgspec.json.encode(described)


def _of_form(summary: BodySummary) -> BodySummary:
    """Its beginning may be the beginning of a recording."""
    return msgspec.structs.replace(summary, first=b"")


async def _until_room(trail: AuditTrail) -> None:
    while trail.crowded:  # noqa: ASYNC110 - it is another thread that makes room
        await asyncio.sleep(LOOK_S)


def _summary(unread: UnreadBody) -> BodySummary:
    return BodySummary(unread.declared, unread.num_received, bytes(unread.first), unread.sha256())


def _note_model(record: Record, model: ResolvedModel) -> None:
    entry = model.entry
    record.model_config = {"root": entry.root, "parent": entry.parent, "max_model_len": entry.max_model_len}
    record.adapter = model.name if entry.parent else None  # servers list an adapter as a model with a parent
    if model.arm is not None:
        record.experiment = {"name": model.experiment, "arm": model.arm.name}


def _route(results: StageResults) -> dict[str, Any] | None:
    sent = results.sent
    if sent is None or not sent.backend or results.model is None:
        return None
    route: dict[str, Any] = {"backend": sent.backend, "model": results.model.name, "why": sent.why}
    if sent.failed:
        route["failed"] = list(sent.failed)
    if results.model.fallback is not None:
        route["fallback"] = results.model.fallback
    if results.region is not None:
        route["region"] = results.region
    if sent.left:
        route["left"] = list(sent.left)
    if sent.prefill is not None:
        route["prefill"] = sent.prefill
    if sent.hedge is not None:
        route["hedge"] = as_fields(sent.hedge)
    if results.shadow is not None:
        route["shadow"] = as_fields(results.shadow)
    return route


def _timings(arrived_s: float, results: StageResults, answer: Answer) -> dict[str, float]:
    """Queue: in this gateway, and in an engine that tells its times: one of this process, or a replica with a whole
    answer. Prefill and decode as that engine tells them; else as seen from here, the way to the backend included."""
    sent = results.sent
    if sent is None:
        return {"queue": 0.0}
    timings = {"queue": sent.queued_s * MS}
    if sent.sent_s is not None and sent.first_byte_s is not None:
        timings["first_byte"] = (sent.first_byte_s - arrived_s) * MS
    if results.request is not None and results.request.stream and answer.first_s is not None:
        timings["ttft"] = (answer.first_s - arrived_s) * MS
        if sent.sent_s is not None:
            timings["prefill"] = (answer.first_s - sent.sent_s) * MS
        if answer.last_s is not None:
            timings["decode"] = (answer.last_s - answer.first_s) * MS
    engine_s = answer.engine_s or {}
    if "ttft" not in timings and sent.sent_s is not None and "prefill" in engine_s:
        timings["ttft"] = (sent.sent_s - arrived_s + engine_s.get("queue", 0.0) + engine_s["prefill"]) * MS
    for name, seconds in engine_s.items():
        timings[name] = seconds * MS + (timings["queue"] if name == "queue" else 0.0)
    return {name: round(value, 3) for name, value in timings.items()}
