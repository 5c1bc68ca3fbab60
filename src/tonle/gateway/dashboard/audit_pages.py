"""The audit trail on the page: search, one record with its verification, a verification of everything.

Does: run searches on a thread, one after the other, and one verification at a time; reply with what was found. Does not:
change the trail, or check who asks (`routes.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from tonle.audit import day_ledger
from tonle.audit.audit_options import AuditOptions
from tonle.audit.findings import Report
from tonle.audit.index import Index, Row, query_time
from tonle.audit.index import Query as IndexQuery
from tonle.audit.record_file import read_record
from tonle.audit.trail import AuditTrail
from tonle.audit.verify import verify
from tonle.audit.verify_record import NO_RECORD, RecordVerdict, verify_record
from tonle.edge.exchange import Exchange
from tonle.errors import CapacityError, NotFound, TonleError
from tonle.gateway.api_keys.key import LOCAL_CALLER
from tonle.gateway.dashboard.background import in_turn, on_thread
from tonle.gateway.dashboard.query import Query
from tonle.gateway.services import Services
from tonle.observe.seen_request import SeenRequest

MAX_FOUND = 500  # records in one reply
MAX_WAITING = 8  # searches, with the one that runs
CLOCKS_APART_S = 0.001  # records are dated by another clock than the one that measures requests
MAX_FINDINGS = 200  # shown of a verification; all are counted
NO_TRAIL = "this server keeps no audit trail; start it with --audit-dir DIR"

ResultT = TypeVar("ResultT")


class AuditPages:
    def __init__(self, services: Services) -> None:
        self._trail = services.trail
        self._searching = asyncio.Lock()  # the index has one writer
        self._num_waiting = 0
        self._verification: asyncio.Task[Report] | None = None

    async def search(self, exchange: Exchange) -> None:
        trail, query = self._need_trail(), Query(exchange.query)
        wanted = IndexQuery(
            text=query.text("text") or None, key_id=query.text("key") or None, model=query.text("model") or None,
            status=query.text("status") or None, since=query_time(query.text("from") or None),
            until=query_time(query.text("to") or None), limit=query.number("limit", 50, most=MAX_FOUND), newest_first=True,
        )  # fmt: skip
        rows, num_records, head = await self._search(lambda: _find(trail.options, wanted))
        state = {
            "directory": str(trail.options.directory),
            "records": num_records,
            "last_seal": None if head is None else head.time,
            "key_fingerprint": None if head is None else head.key,
            "alarm": trail.stats.failing,
        }
        _send(exchange, {"records": rows, "state": state})

    async def record(self, exchange: Exchange) -> None:
        trail, name = self._need_trail(), exchange.path.rpartition("/audit/")[2]
        found = await self._search(lambda: _record(trail.options, name, None))
        if found is None:
            raise NotFound("no record has this id")
        record, verdict = found
        if record is None:
            raise NotFound(f"the record cannot be shown, {verdict.verified}: {verdict.detail}")
        redacted = record["chain"].get("redacted")
        _send(exchange, {
            "record": record,
            "redacted": sorted(redacted) if isinstance(redacted, dict) else [],
            "verified": verdict.verified,
            "detail": verdict.detail,
        })  # fmt: skip

    async def of_request(self, seen: SeenRequest) -> dict[str, Any]:
        """The record of a request, as the page shows it beside its times."""
        trail = self._trail
        found, verdict = None, NO_RECORD
        if trail is None:
            verdict = RecordVerdict("none", NO_TRAIL)
        else:
            try:
                found = await self._search(lambda: _record(trail.options, seen.id, seen))
            except TonleError as error:
                verdict = RecordVerdict("none", error.message)
        record = None
        if found is not None:
            record, verdict = found
        return {"record": record, "verified": verdict.verified, "detail": verdict.detail}

    async def verify(self, exchange: Exchange) -> None:
        """All of the trail. Who asks while one runs gets its result."""
        options = self._need_trail().options
        if self._verification is None or self._verification.done():
            self._verification = asyncio.create_task(on_thread(lambda: _verify(options), "tonle-verify"))
        report = await asyncio.shield(self._verification)
        findings = [str(each) for each in report.findings[:MAX_FINDINGS]]
        num_more = len(report.findings) + report.num_unlisted - len(findings)
        _send(exchange, {
            "ok": report.ok,
            "summary": _summary(report),
            "findings": [*findings, *([f"and {num_more} more"] if num_more else [])],
            "checked": report.num_records,
        })  # fmt: skip

    def _need_trail(self) -> AuditTrail:
        if self._trail is None:
            raise NotFound(NO_TRAIL)
        return self._trail

    async def _search(self, work: Callable[[], ResultT]) -> ResultT:
        """One after the other. Raises `CapacityError`."""
        if self._num_waiting >= MAX_WAITING:
            raise CapacityError("other searches of the audit trail are running", retry_after_s=2)
        self._num_waiting += 1

        def ended() -> None:
            self._num_waiting -= 1

        return await in_turn(self._searching, work, "tonle-audit-search", ended)


def _find(options: AuditOptions, query: IndexQuery) -> tuple[list[Row], int, day_ledger.Head | None]:
    try:
        with Index(options.directory) as index:
            return list(index.find(query)), index.count(), _last_head(options)
    except NotFound:  # nothing was recorded yet
        return [], 0, None


def _record(
    options: AuditOptions, name: str, seen: SeenRequest | None
) -> tuple[dict[str, Any] | None, RecordVerdict] | None:
    """The newest with this id; of a request, one of its key that was opened between its arrival and its end: others may have
    the same id. Without the record if its file cannot be read."""
    since = "" if seen is None else _time_text(seen.arrived - CLOCKS_APART_S)
    until = None if seen is None else _time_text(seen.arrived + seen.total_s)
    key_ids = () if seen is None else (seen.key_id or LOCAL_CALLER.id, None)  # as `recording.py` calls unknown callers
    try:
        with Index(options.directory) as index:
            rows = index.named(name, until=until)
    except NotFound:
        return None
    for row in rows:
        is_its = seen is None or (row.request_id == name and row.key_id in key_ids)
        if is_its and since <= (row.time or ""):
            verdict = verify_record(
                options.directory, row.day, row.file, key_file=options.key_file, fingerprint=options.fingerprint
            )
            try:
                return read_record(options.directory / row.day / row.file), verdict
            except (OSError, ValueError):
                return None, verdict
    return None


def _time_text(moment: float) -> str:
    """As records have it."""
    return day_ledger.text_of(int(moment * 1e9))


def _last_head(options: AuditOptions) -> day_ledger.Head | None:
    try:
        days = day_ledger.days_in(options.directory)
        return day_ledger.read_head(options.directory / days[-1] / day_ledger.HEAD_NAME) if days else None
    except (OSError, ValueError):
        return None


def _verify(options: AuditOptions) -> Report:
    # One worker: the event loop of this process shares the interpreter with it.
    return verify(
        options.directory, key_file=options.key_file, fingerprint=options.fingerprint, anchor_path=options.anchor,
        num_workers=1,
    )  # fmt: skip


def _summary(report: Report) -> str:
    days = f"{len(report.days)} day{'s' if len(report.days) != 1 else ''}"
    checked = f"{report.num_records:,} records of {days}"
    if not report.ok:
        num_findings = len(report.findings) + report.num_unlisted
        return f"{num_findings:,} finding{'s' if num_findings != 1 else ''} in {checked}"
    trust = "; the key was found in the trail itself, and nowhere else" if report.first_use else ""
    return f"{checked}: in order, signed by {report.key[:16]}… ({report.key_from}){trust}"


def _send(exchange: Exchange, body: Any) -> None:
    exchange.reply(msgspec.json.encode(body))
