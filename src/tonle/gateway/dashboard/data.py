"""The figures that the page asks for: history, requests, usage.

Does: read queries, call what remembers (`tonle.observe`) on a thread where it reads a file, reply with JSON or CSV. Does not:
check who asks (`routes.py`).
"""

from __future__ import annotations

import asyncio
import csv
import datetime
import io
from typing import Any

import msgspec

from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest, NotFound
from tonle.gateway.dashboard.audit_pages import AuditPages
from tonle.gateway.dashboard.query import Query
from tonle.gateway.explain_page import ExplainPage
from tonle.gateway.services import Services
from tonle.observe.request_row import row_of

RANGES = (300, 3600, 86_400, 2_592_000)  # seconds
MAX_REQUESTS = 1000  # in one reply
MAX_NUMBER = 2**53  # of a request
MAX_USAGE_DAYS = 400
_FIRST_DAY = datetime.date(1970, 1, 30)
USAGE_COLUMNS = (
    "day", "key_id", "key_name", "model", "requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens",
    "device_s", "cost", "audio_s", "characters", "images",
)  # fmt: skip
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would compute a cell that begins so


class DataPages:
    def __init__(self, services: Services, audit: AuditPages, explain: ExplainPage) -> None:
        self._services = services
        self._audit = audit
        self._explain = explain

    async def history(self, exchange: Exchange) -> None:
        wanted = Query(exchange.query).number("range", 3600, most=RANGES[-1])
        if wanted not in RANGES:
            raise InvalidRequest(f"range must be one of {', '.join(map(str, RANGES))} seconds", param="range")
        observed = self._services.observed
        found: Any = {"step": 1, "t": [], "series": {}}
        if observed is not None:
            found = await asyncio.to_thread(observed.history.series, wanted)
        _send(exchange, found)

    async def requests(self, exchange: Exchange) -> None:
        query, observed = Query(exchange.query), self._services.observed
        if observed is None:
            _send(exchange, {"requests": [], "kept": 0, "most": 0})
            return
        log = observed.request_log
        found = log.newest(
            query.number("limit", 100, most=MAX_REQUESTS),
            before=query.number("before", 0, most=MAX_NUMBER) or None, text=query.text("text"),
            status=query.text("status"), model=query.text("model"), key=query.text("key"), backend=query.text("backend"),
        )  # fmt: skip
        _send(exchange, {"requests": [row_of(seen) for seen in found], "kept": len(log), "most": log.most})

    async def request(self, exchange: Exchange) -> None:
        """The newest of this id; ?number=N: the one with this number, of several with one id."""
        observed, name = self._services.observed, exchange.path.rpartition("/requests/")[2]
        number = Query(exchange.query).number("number", 0, most=MAX_NUMBER)
        seen = None
        if observed is not None:
            seen = observed.request_log.find(name, lambda each: number in (0, each.number))
        if seen is None:
            raise NotFound("this request is not among the latest ones; the audit trail may have a record of it")
        audit, explanation = await self._audit.of_request(seen), await self._explain.explanation(seen)
        _send(exchange, {"request": row_of(seen), "explanation": explanation, "audit": audit})

    # -- usage

    async def usage(self, exchange: Exchange) -> None:
        start, end = _days(exchange)
        rows = await self._usage_rows(start, end)
        _send(exchange, {"rows": rows})

    async def usage_csv(self, exchange: Exchange) -> None:
        start, end = _days(exchange)
        rows = await self._usage_rows(start, end)
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(USAGE_COLUMNS)
        writer.writerows([_cell(getattr(row, name)) for name in USAGE_COLUMNS] for row in rows)
        file = f"tonle-usage-{start}-{end}.csv"
        exchange.reply(
            text.getvalue().encode(), content_type="text/csv; charset=utf-8",
            headers=[("content-disposition", f'attachment; filename="{file}"')],
        )  # fmt: skip

    async def _usage_rows(self, start: datetime.date, end: datetime.date) -> list[Any]:
        observed = self._services.observed
        if observed is None:
            return []
        return await observed.usage_rows(start.isoformat(), end.isoformat())


def _days(exchange: Exchange) -> tuple[datetime.date, datetime.date]:
    """The last 30 days unless told, UTC. Raises `InvalidRequest`."""
    query, today = Query(exchange.query), datetime.datetime.now(datetime.UTC).date()
    end = query.day("to", today)
    start = query.day("from", max(end, _FIRST_DAY) - datetime.timedelta(days=29))
    if not datetime.timedelta(0) <= end - start <= datetime.timedelta(days=MAX_USAGE_DAYS):
        raise InvalidRequest(f"from must be before to, by at most {MAX_USAGE_DAYS} days", param="from")
    return start, end


def _cell(value: Any) -> Any:
    """Names come from callers and operators: none may become a formula in a spreadsheet."""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value


def _send(exchange: Exchange, body: Any) -> None:
    exchange.reply(msgspec.json.encode(body))
