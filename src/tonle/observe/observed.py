"""`Observed`: all that a server remembers of its requests and its load, in one place.

Does: hand ended requests to what counts them, start and stop that, save history and usage every few seconds. Does not: count,
or look for what alerts are about (`gateway/alert_sources.py`).

What only the dashboard's past shows is counted many requests at a time, which is cheaper than one by one: a request that ends is
put on a list, and counted when that is long, when its second ends, before a save, and when somebody asks.

Without a dashboard only the latest requests are kept: no timer runs, and no file is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tonle.observe.backend_figures import BackendFigures
from tonle.observe.backend_state import BackendState
from tonle.observe.history import History
from tonle.observe.request_log import RequestLog
from tonle.observe.sampler import Sampler
from tonle.observe.seen_request import SeenRequest
from tonle.observe.usage import Usage, UsageRow

if TYPE_CHECKING:
    from tonle.observe.alerts import Alerts
    from tonle.observe.sla import Sla

log = logging.getLogger("tonle.observe")

SAVE_S = 10.0
MOST_UNCOUNTED = 250  # requests: counting them takes less than a millisecond, in which no other request goes on


class Observed:
    """For the thread of the event loop. `ended` is the only call of the pipeline."""

    def __init__(
        self,
        *,
        sla: Sla,
        sampler: Sampler,
        history: History,
        alerts: Alerts | None = None,
        keeps: bool = True,
    ) -> None:
        """`keeps`: figures are taken each second, and kept, as is usage."""
        self.request_log = RequestLog()
        self.backend_figures = BackendFigures()
        self.sampler = sampler
        self.history = history
        self.usage = Usage(history.file)
        self.sla = sla
        self.alerts = alerts
        self.keeps = keeps
        self._uncounted: list[SeenRequest] = []  # by the sampler and by usage
        sampler.collect = self.count
        self._saver: asyncio.Task[None] | None = None

    def ended(self, seen: SeenRequest) -> None:
        self.request_log.add(seen)
        self.backend_figures.add(seen)
        self.sla.ended(seen)
        if self.keeps:
            uncounted = self._uncounted
            uncounted.append(seen)
            if len(uncounted) >= MOST_UNCOUNTED:
                self.count()

    def count(self) -> None:
        """Those that have ended so far, each of them once."""
        if requests := self._uncounted:
            self._uncounted = []
            _count(self.sampler.count, requests)
            _count(self.usage.count, requests)

    async def usage_rows(self, start_day: str, end_day: str) -> list[UsageRow]:
        """As `Usage.rows`, up to the latest request."""
        self.count()
        return await asyncio.to_thread(self.usage.rows, start_day, end_day)

    def states(self) -> dict[str, BackendState]:
        """What backends tell of themselves, by name; absent: one that does not."""
        return self.sampler.states

    async def start(self) -> None:
        if self.keeps:
            await asyncio.to_thread(self.history.open)
            self.sampler.listen(self.history.add)
            self.sampler.start()
            self._saver = asyncio.create_task(self._save_often())

    async def stop(self) -> None:
        """Requests have ended; what is known of them is saved when this returns."""
        self.sampler.stop()
        if self._saver is not None:
            self._saver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._saver
            self._saver = None
            self.count()
            await asyncio.to_thread(self._save)
            await asyncio.to_thread(self.history.file.close)

    async def _save_often(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            self.count()
            try:
                await asyncio.to_thread(self._save)
            except Exception:
                log.exception("figures and usage could not be saved; trying again")

    def _save(self) -> None:
        self.history.file.save((self.history, self.usage))


def _count(take: Callable[[Sequence[SeenRequest]], None], requests: list[SeenRequest]) -> None:
    """`take` takes all of them or none: those beside one that cannot be counted are not lost with it."""
    try:
        take(requests)
    except Exception:
        for seen in requests:
            try:
                take([seen])
            except Exception:
                log.exception("a request could not be counted, id %s", seen.id)
