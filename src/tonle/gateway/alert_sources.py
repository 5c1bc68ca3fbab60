"""`AlertSources`: looks once a second for what alerts are about: missed targets, dead backends, alarms of the audit.

Does: tell `Alerts` what is wrong and what is right again. Does not: post (`observe/alerts.py`), judge latencies
(`observe/sla.py`) or probe servers (`backends/backend_pool.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from tonle.audit.audit_stats import Alarm
from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import UpstreamError
from tonle.errors import TonleError
from tonle.gateway.backends.backend import NOT_PROBED, Backend
from tonle.gateway.sleep_pages import Sleeper
from tonle.observe.alerts import Alerts
from tonle.observe.sla import TITLES, Sla, TargetVerdict

log = logging.getLogger("tonle.alerts")

INTERVAL_S = 1.0
ASK_TIMEOUT_S = 5.0  # of the engine in this process
TRIED_S = 60.0  # a backend that is on trial, and gets no request, counts as back after so long
NO_MORE_LOST_S = 600.0  # then losses of records are over

_LOST = "lost records"
_ENGINE = "the engine"
_WRITING = "writing"


class AlertSources:
    """Use from one event loop; `on_alarm` from any thread."""

    def __init__(
        self,
        alerts: Alerts,
        sla: Sla,
        backends: list[Backend],
        *,
        sleeper: Sleeper | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sleeper`: puts the engine in this process to sleep, if anything does."""
        self._alerts = alerts
        self._sla = sla
        self._backends = backends
        self._sleeper = sleeper
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._paused_s: dict[str, float] = {}  # backend -> when its breaker was last open
        self._was_ready = False  # the engine in this process: until it is, it is being loaded
        self._local_name = _ENGINE  # what of this process is dead, or was: it, or one of its worker pools
        self._dead: set[str] = set()  # backends that an alert was raised for
        self._lost_s: float | None = None  # when records were lost last
        self._num_lost = 0  # since that alert began

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._alerts.start()
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        await self._alerts.stop()

    def on_alarm(self, alarm: Alarm) -> None:
        """Of the audit trail, on its thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._take_alarm, alarm)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.look()
            except Exception:
                log.exception("looking for alerts failed")

    async def look(self) -> None:
        """At everything, once."""
        for target in self._sla.verdict().targets:
            self._judge(target)
        used = [each for each in self._backends if not each.leaving and (each.local or not each.draining)]
        for name in self._dead - {backend.name for backend in used}:
            self._forget(name)
        for backend in used:
            why = await self._why_not_ready(backend) if backend.local else self._why_dead(backend)
            subject = "engine" if backend.local else backend.name
            if why is None:
                self._dead.discard(backend.name)
                self._alerts.resolve("backend", subject, f"{self._named(backend)} answers again")
            else:
                self._dead.update(() if backend.local else (backend.name,))
                self._alerts.fire("backend", subject, f"{self._named(backend)} is dead: {why}", {"reason": why})
        if self._lost_s is not None and self._clock() - self._lost_s >= NO_MORE_LOST_S:
            self._lost_s = None
            self._alerts.resolve("audit", _LOST, "no more audit records were lost for ten minutes")

    def _forget(self, name: str) -> None:
        """A dead backend that nothing is sent to any more: its operator knows."""
        self._dead.discard(name)
        self._paused_s.pop(name, None)
        is_there = any(each.name == name and not each.leaving for each in self._backends)
        self._alerts.resolve("backend", name, f"backend {name} was {'drained' if is_there else 'removed'}")

    def _judge(self, target: TargetVerdict) -> None:
        if target.meets:
            self._alerts.resolve("sla", target.name, f"{TITLES[target.name]} p95 is within its target again")
            return
        details = msgspec.to_builtins(target)
        self._alerts.fire("sla", target.name, target.sentence, details)

    def _why_dead(self, backend: Backend) -> str | None:
        """None: it is healthy. One whose breaker is half open is dead until a request has succeeded."""
        now_s, breaker = self._clock(), backend.breaker
        if not breaker.allows:
            self._paused_s[backend.name] = now_s
        elif breaker.state == "closed" or now_s - self._paused_s.get(backend.name, now_s - TRIED_S) >= TRIED_S:
            self._paused_s.pop(backend.name, None)
        if backend.unhealthy_reason not in (None, NOT_PROBED):
            return backend.unhealthy_reason
        return "several requests in a row failed" if backend.name in self._paused_s else None

    async def _why_not_ready(self, backend: Backend) -> str | None:
        """What the engine in this process, or a worker pool, says of itself; None also while its model is loaded for the first
        time, and while its admin has it sleep."""
        if self._sleeps:
            return None
        answer = BufferedReply()
        try:
            await backend.send("GET", "/health/ready", b"", {}, answer, first_s=ASK_TIMEOUT_S)
            page = {} if answer.status == 200 else msgspec.json.decode(answer.body)
            why = None if answer.status == 200 else str(page.get("reason"))
            if pool := page.get("pool"):
                self._local_name, why = f"the worker pool {pool}", str(why).removeprefix(f"{pool}: ")
            elif why is not None:
                self._local_name = _ENGINE
        except (TonleError, UpstreamError) as error:
            self._local_name, why = _ENGINE, str(error)
        self._was_ready = self._was_ready or why is None
        return why if self._was_ready and not self._sleeps else None

    @property
    def _sleeps(self) -> bool:
        return self._sleeper is not None and self._sleeper.is_sleeping

    def _take_alarm(self, alarm: Alarm) -> None:
        if alarm.kind == "lost":
            self._num_lost = alarm.num_lost + (0 if self._lost_s is None else self._num_lost)
            self._lost_s = self._clock()
            before = "" if self._num_lost == alarm.num_lost else f"; {self._num_lost} since this began"
            self._alerts.fire("audit", _LOST, f"{alarm.message}{before}", {"num_lost": self._num_lost})
        elif alarm.kind == "failing":
            self._alerts.fire("audit", _WRITING, alarm.message)
        else:
            self._alerts.resolve("audit", _WRITING, alarm.message)

    def _named(self, backend: Backend) -> str:
        return self._local_name if backend.local else f"backend {backend.name}"
