"""`Observed`: all that a server remembers of its requests and its load, in one place.

Does: hand each ended request to what counts it, start and stop that, save history and usage every few seconds. Does not: count,
or look for what alerts are about (`gateway/alert_sources.py`).

Without a dashboard only the latest requests are kept: no timer runs, and no file is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from tonle.observe.backend_figures import BackendFigures
from tonle.observe.backend_state import BackendState
from tonle.observe.history import History
from tonle.observe.request_log import RequestLog
from tonle.observe.sampler import Sampler
from tonle.observe.seen_request import SeenRequest
from tonle.observe.usage import Usage

if TYPE_CHECKING:
    from tonle.observe.alerts import Alerts
    from tonle.observe.sla import Sla

log = logging.getLogger("tonle.observe")

SAVE_S = 10.0


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
        self._saver: asyncio.Task[None] | None = None

    def ended(self, seen: SeenRequest) -> None:
        self.request_log.add(seen)
        self.backend_figures.add(seen)
        self.sla.ended(seen)
        if self.keeps:
            self.sampler.add(seen)
            self.usage.add(seen)

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
            await asyncio.to_thread(self._save)
            await asyncio.to_thread(self.history.file.close)

    async def _save_often(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            try:
                await asyncio.to_thread(self._save)
            except Exception:
                log.exception("figures and usage could not be saved; trying again")

    def _save(self) -> None:
        self.history.file.save((self.history, self.usage))
