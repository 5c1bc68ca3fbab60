"""`Controller`: keeps as many replicas as the load needs, with the settings of now, and lists them for gateways.

Does: look at every replica each second, scale, replace what died and what has old settings, drain before it stops one. Does not:
know where replicas run (`launcher.py`), or see a request. It keeps nothing on disk: a new controller finds the replicas of the
one before it, so that new settings, or a crash, cost no replica.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tonle.child.supervisor import Backoff
from tonle.config.routing import BackendConfig
from tonle.scaleout.demand import ReplicaLoad, ScaleLimits, Scaler
from tonle.scaleout.launcher import Launcher, Report
from tonle.scaleout.probe import ReplicaProbe
from tonle.scaleout.reconcile import ReplicaFacts, State, reconcile

log = logging.getLogger("tonle.scaleout")

LOOK_S = 1.0
UNLISTED_S = 5.0  # gateways have noticed by then that a replica left the list
FIRST_RETRY_S, MAX_RETRY_S = 2.0, 300.0  # before another start after one that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    name: str  # of the service
    version: str  # of what replicas are started with
    scale: ScaleLimits
    max_surge: int
    start_timeout_s: float
    drain_timeout_s: float
    api_key: str | None = field(default=None, repr=False)  # of the replicas


@dataclass(slots=True)
class Replica:
    id: str
    since_s: float  # it has been in its state
    state: State = "starting"
    report: Report = field(default_factory=Report)
    probe: ReplicaProbe | None = None
    load: ReplicaLoad | None = None
    was_ready: bool = False
    is_stopping: bool = False

    def enter(self, state: State, now_s: float) -> None:
        if state != self.state:
            self.state, self.since_s = state, now_s


class Controller:
    """For one event loop."""

    def __init__(
        self, launcher: Launcher, settings: ControllerSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._launcher = launcher
        self._settings = settings
        self._clock = clock
        self._replicas: dict[str, Replica] = {}
        self._scaler: Scaler | None = None  # once it is known how many replicas there are
        self._backoff = Backoff(FIRST_RETRY_S, max_s=MAX_RETRY_S, clock=clock)
        self._next_start_s = 0.0
        self._problem: str | None = None  # of the last start that failed, until one succeeds
        self._is_closing = False
        self._has_looked = False

    # -- what others see

    def listed(self) -> list[BackendConfig] | None:
        """The replicas that gateways may send requests to. None: not known yet.

        One that is not ready for the moment stays: gateways see that for themselves, and they may see more than this machine.
        """
        if not self._has_looked:
            return None
        most = 2 * self._settings.scale.max_num_seqs  # what is too much waits there, where it is counted
        return [
            BackendConfig(
                url=replica.report.url, name=f"{self._settings.name}-{replica.id}", kind="tonle", max_concurrent=most
            )
            for replica in self._replicas.values()
            if replica.was_ready and replica.state != "draining" and replica.report.url is not None
        ]

    def status(self) -> dict[str, Any]:
        now_s = self._clock()
        return {
            "name": self._settings.name,
            "version": self._settings.version,
            "wanted": 0 if self._is_closing else None if self._scaler is None else self._scaler.replicas,
            "problem": self._problem,
            "replicas": [_shown(replica, now_s, self._settings.version) for replica in self._replicas.values()],
        }

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    def close(self) -> None:
        """From now on all replicas are drained and stopped, and none is started."""
        self._is_closing = True

    # -- the loop

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("looking after the replicas of %s failed; trying again", self._settings.name)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """See how things are, and take the next steps."""
        answering = [each.id for each in self._replicas.values() if each.state == "ready"]
        self._take(await self._launcher.reports(answering))
        await asyncio.gather(*(self._ask(replica) for replica in self._replicas.values()))
        await self._end_late()
        if self._is_closing:
            for replica in self._replicas.values():
                self._drain(replica)
        else:
            await self._step()
        await self._stop_drained()
        self._has_looked = True

    def _take(self, reports: dict[str, Report]) -> None:
        now_s = self._clock()
        for id in [id for id in self._replicas if id not in reports]:
            gone = self._replicas.pop(id)
            if not gone.is_stopping:
                self._note_death(gone, "its node or its actor is gone")
            _close(gone)
        for id, report in reports.items():
            replica = self._replicas.setdefault(id, Replica(id, now_s))
            if report.url != replica.report.url:
                _close(replica)
                if report.url is not None:
                    if replica.state == "starting":
                        replica.since_s = now_s  # until now it waited for a node
                    replica.probe = ReplicaProbe(report.url, api_key=self._settings.api_key)
            replica.report = report

    async def _ask(self, replica: Replica) -> None:
        if replica.probe is None or replica.report.ended is not None:
            return
        is_ready, replica.load = await asyncio.gather(replica.probe.is_ready(), replica.probe.load())
        if replica.state == "draining":
            return
        if is_ready and replica.state == "starting":
            log.info("replica %s is ready at %s", replica.id, replica.report.url)
            replica.was_ready = True
            if replica.report.version == self._settings.version:
                self._problem = None
        replica.enter("ready" if is_ready else "starting", self._clock())

    async def _end_late(self) -> None:
        """Stop those whose process ended, and those that were not ready for too long."""
        now_s, limit_s = self._clock(), self._settings.start_timeout_s
        for replica in self._replicas.values():
            if replica.is_stopping:
                continue
            reason = replica.report.ended
            is_placed = replica.report.url is not None  # one that waits for a GPU is not late
            if reason is None and replica.state == "starting" and is_placed and now_s - replica.since_s > limit_s:
                reason = f"it was not ready for {limit_s:g} s"
            if reason is not None:
                self._note_death(replica, reason)
                await self._stop(replica)

    def _note_death(self, replica: Replica, reason: str) -> None:
        log.warning("replica %s ended: %s", replica.id, reason)
        if (
            not replica.was_ready
            and replica.state == "starting"
            and replica.report.version in (None, self._settings.version)
        ):
            self._problem = f"replica {replica.id} did not start: {reason}"
            self._next_start_s = self._clock() + self._backoff.next_s()

    async def _step(self) -> None:
        staying = [each for each in self._replicas.values() if each.state != "draining" and not each.is_stopping]
        if self._scaler is None:
            self._scaler = Scaler(self._settings.scale, len(staying))
        now_s, version = self._clock(), self._settings.version
        is_settled = all(each.state == "ready" or each.was_ready for each in staying)
        loads = [each.load for each in staying if each.state == "ready"]
        before, wanted = self._scaler.replicas, self._scaler.look(now_s, loads, is_settled=is_settled)
        if wanted != before:
            log.info("%s: %d replicas are wanted instead of %d", self._settings.name, wanted, before)
        facts = [
            ReplicaFacts(
                id=each.id, version=each.report.version or version, state=each.state, age_s=now_s - each.since_s,
                requests=0 if each.load is None else each.load.running + each.load.waiting,
            )
            for each in staying
        ]  # fmt: skip
        steps = reconcile(facts, wanted, version, self._settings.max_surge)
        for id in steps.drain:
            self._drain(self._replicas[id])
        if now_s >= self._next_start_s:
            for _ in range(steps.start):
                await self._start()

    async def _start(self) -> None:
        id = secrets.token_hex(4)
        self._replicas[id] = Replica(id, self._clock(), report=Report(version=self._settings.version))
        self._backoff.started()
        log.info("starting replica %s", id)
        try:
            await self._launcher.start(id)
        except Exception as error:
            self._note_death(self._replicas.pop(id), f"{type(error).__name__}: {error}")

    def _drain(self, replica: Replica) -> None:
        if replica.state != "draining":
            log.info("replica %s gets no more requests", replica.id)
            replica.enter("draining", self._clock())

    async def _stop_drained(self) -> None:
        now_s, settings = self._clock(), self._settings
        for replica in self._replicas.values():
            if replica.state != "draining" or replica.is_stopping:
                continue
            drained_s = now_s - replica.since_s
            is_idle = not replica.was_ready or (replica.load is not None and replica.load.is_idle)
            grace_s = UNLISTED_S if replica.was_ready else 0.0
            if (drained_s >= grace_s and is_idle) or drained_s >= settings.drain_timeout_s:
                await self._stop(replica)

    async def _stop(self, replica: Replica) -> None:
        replica.is_stopping = True
        replica.enter("draining", self._clock())
        await self._launcher.stop(replica.id)


def _close(replica: Replica) -> None:
    if replica.probe is not None:
        replica.probe.close()
        replica.probe = None


def _shown(replica: Replica, now_s: float, version: str) -> dict[str, Any]:
    load = replica.load
    return {
        "id": replica.id,
        "state": "stopping" if replica.is_stopping else replica.state,
        "for_s": round(now_s - replica.since_s, 1),
        "url": replica.report.url,
        "settings": "unknown" if (found := replica.report.version) is None else "new" if found == version else "old",
        "running": None if load is None else load.running,
        "waiting": None if load is None else load.waiting,
        "kv_use": None if load is None else round(load.kv_use, 3),
    }
