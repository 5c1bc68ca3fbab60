"""`SharedLimiter`: limits that hold across gateways, counted in a `SharedCounts` on a server.

Does: one trip to charge a request of a key that has limits, none for others; settle in the background; renew leases of
running requests; notice that the server cannot be reached, and then refuse or count in memory, as configured.
Does not: block the event loop, or try a server that is known to be lost once per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tonle.errors import StoreLost
from tonle.gateway.api_keys.key import Key, KeyLimits
from tonle.gateway.limits.limiter import Lease, refusal
from tonle.gateway.limits.memory_limiter import MemoryLimiter
from tonle.gateway.limits.settlement_queue import SettlementQueue
from tonle.gateway.limits.shared_counts import Held, OverLimit, SharedCounts

log = logging.getLogger("tonle.gateway")

UNLIMITED = KeyLimits()
USAGE_S = 2.0  # how often usage of requests that hold no lease is sent to the server
RETRY_S = 1.0  # how often a server that was lost is tried again
GRACE_S = 0.1  # a caller just answered by another gateway may arrive before that gateway has freed the slot
RENEWALS = 3  # of a lease, before it would run out


class SharedLease:
    """Held on the server."""

    __slots__ = ("_held", "_limiter")

    def __init__(self, limiter: SharedLimiter, held: Held) -> None:
        self._limiter = limiter
        self._held = held

    def settle(self, used_tokens: int) -> None:
        self._limiter.settle(self._held, used_tokens)


class UnheldLease:
    """Not held on the server, which is only sent what was used. `local`: charged in memory while the server is lost."""

    __slots__ = ("_key_id", "_limiter", "_local")

    def __init__(self, limiter: SharedLimiter, key_id: str, local: Lease | None = None) -> None:
        self._limiter = limiter
        self._key_id = key_id
        self._local = local

    def settle(self, used_tokens: int) -> None:
        if self._local is not None:
            self._local.settle(used_tokens)
        self._limiter.settlements.add_usage(self._key_id, used_tokens)


class SharedLimiter:
    """Owns the leases of this gateway's running requests. Build it on the event loop it is used on."""

    def __init__(self, counts: SharedCounts, default: KeyLimits, *, lease_s: float, serve_when_lost: bool) -> None:
        self.settlements = SettlementQueue()
        self.lost: str | None = None  # why the server cannot be used; None: it can
        self.num_losses = 0
        self._counts = counts
        self._default = default
        self._lease_s = lease_s
        self._local = MemoryLimiter(default) if serve_when_lost else None
        self._running: dict[str, Held] = {}
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._renew_at_s = 0.0  # of the loop's clock
        self._stopping = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    # -- requests

    async def charge(self, key: Key, tokens: int) -> Lease:
        limits = key.limits.over(self._default)
        if limits == UNLIMITED:
            return UnheldLease(self, key.id)
        if self.lost is None:
            await self.settlements.ended(key.id)  # a caller that asks again after an answer must find its slot free
        if self.lost is None:
            try:
                return await self._charge(Held(secrets.token_hex(12), key.id, tokens), limits)
            except StoreLost as error:
                self._lose(error)
        if self._local is None:
            raise StoreLost("limits are shared by several gateways, and the server that keeps them cannot be reached",
                            retry_after_s=RETRY_S)  # fmt: skip
        return UnheldLease(self, key.id, await self._local.charge(key, tokens))

    async def _charge(self, held: Held, limits: KeyLimits) -> SharedLease:
        """A caller who hangs up does not stop the trip, so that its result is known, and settled."""
        trip = asyncio.create_task(self._ask(held, limits))
        try:
            over = await asyncio.shield(trip)
        except asyncio.CancelledError:
            trip.add_done_callback(lambda trip: self._void(trip, held))
            raise
        except StoreLost:
            self.settlements.add(held, 0)  # it may have been charged
            raise
        if over is not None:
            raise refusal(over.name, limits, over.wait_s)
        self._running[held.lease_id] = held
        return SharedLease(self, held)

    async def _ask(self, held: Held, limits: KeyLimits) -> OverLimit | None:
        over = await self._counts.charge(held, limits, lease_s=self._lease_s)
        if over is None or over.name != "max_concurrent":
            return over
        await asyncio.sleep(GRACE_S)
        return await self._counts.charge(held, limits, lease_s=self._lease_s)

    def _void(self, trip: asyncio.Task[OverLimit | None], held: Held) -> None:
        if trip.cancelled() or trip.exception() is not None or trip.result() is None:
            self.settle(held, 0)

    def settle(self, held: Held, used: int) -> None:
        self._running.pop(held.lease_id, None)
        self.settlements.add(held, used)
        self._wake.set()

    async def used_today(self, key_ids: Iterable[str]) -> dict[str, int]:
        return await self._counts.used_today(key_ids)

    # -- the background task that settles and renews

    async def start(self) -> None:
        self._worker = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """All that has ended is settled, if the server is there."""
        if self._worker is None:
            return
        self._stopping = True
        self._wake.set()
        await self._worker  # never in the middle of a trip: it would be unknown whether it counted
        try:
            await self.settlements.send(self._counts)
        except StoreLost as error:
            log.error("what keys used at the end could not be counted: %s", error)

    async def _work(self) -> None:
        clock = asyncio.get_running_loop().time
        while not self._stopping:
            await self._rest(RETRY_S if self.lost is not None else min(USAGE_S, max(0.0, self._renew_at_s - clock())))
            try:
                sent = await self.settlements.send(self._counts)
                if self._running and (self.lost is not None or clock() >= self._renew_at_s):
                    await self._counts.renew(list(self._running.values()), lease_s=self._lease_s)
                    sent = True
                if clock() >= self._renew_at_s:
                    self._renew_at_s = clock() + self._lease_s / RENEWALS
                if self.lost is not None and not sent:
                    await self._counts.ping()
                self._find()
            except StoreLost as error:
                self._lose(error)
            except Exception:
                log.exception("shared limits: what has ended could not be counted; trying again")
                await asyncio.sleep(RETRY_S)

    async def _rest(self, pause_s: float) -> None:
        """Until a lease was settled, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        self._wake.clear()

    def _lose(self, error: StoreLost) -> None:
        if self.lost is None:
            self.num_losses += 1
            instead = "refused with 503" if self._local is None else "served, with limits counted by each gateway alone"
            log.error("shared limits are lost: %s. Requests of keys with limits are %s", error, instead)
        self.lost = str(error)

    def _find(self) -> None:
        if self.lost is not None:
            self.lost = None
            log.warning("shared limits are back: %s answers again", self._counts.place)


class SharedMetrics(Collector):
    """Whether shared limits are within reach, for Prometheus."""

    def __init__(self, limiter: SharedLimiter) -> None:
        self._limiter = limiter

    def collect(self) -> Iterator[Metric]:
        limiter = self._limiter
        yield GaugeMetricFamily("tonle:state_up", "1 = the shared state answers.", value=float(limiter.lost is None))
        yield CounterMetricFamily("tonle:state_losses", "Times the shared state was lost.", value=limiter.num_losses)
        yield GaugeMetricFamily("tonle:state_leases", "Running requests it knows of.", value=limiter.num_running)
