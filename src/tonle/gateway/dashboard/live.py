"""`Live`: the stream of events that keeps the page up to date, one each second.

Does: make each event once for all listeners, leave events out for those that read too slowly, end when the server stops or a
session does. Does not: run while no page is open, or measure anything (`observe/sampler.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from tonle.edge.exchange import EVENT_STREAM, Exchange
from tonle.errors import CapacityError, ShuttingDown
from tonle.gateway.backend_admin import shown_backend
from tonle.gateway.services import Services
from tonle.observe.request_row import row_of

if TYPE_CHECKING:
    from tonle.observe.sample import Sample

MAX_STREAMS = 64
MAX_OF_A_KEY = 48  # so that no key takes them all
SHUTTING_DOWN = "the server is shutting down"
_STREAM_HEADERS = (("x-accel-buffering", "no"),)  # a proxy must not hold events back
_encode = msgspec.json.Encoder().encode


class _Stream:
    __slots__ = ("ended", "exchange")

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.ended = asyncio.Event()


class Live:
    """For the thread of the event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._streams: set[_Stream] = set()
        self._latest = b""  # event; empty while no page is open
        self._unlisten: Callable[[], None] = lambda: None

    async def stream(self, exchange: Exchange) -> None:
        if not self._services.is_open():
            raise ShuttingDown(SHUTTING_DOWN)
        if len(self._streams) >= MAX_STREAMS:
            raise CapacityError(f"{MAX_STREAMS} pages of the dashboard are open; close one", retry_after_s=10)
        if sum(each.exchange.key.id == exchange.key.id for each in self._streams) >= MAX_OF_A_KEY:
            raise CapacityError(
                f"{MAX_OF_A_KEY} pages of the dashboard are open with this key; close one", retry_after_s=10
            )
        exchange.start(content_type=EVENT_STREAM, headers=_STREAM_HEADERS)
        if exchange.method == "HEAD":
            exchange.end()
            return
        stream = _Stream(exchange)
        self._streams.add(stream)
        try:
            exchange.write(self._first())
            await stream.ended.wait()
            exchange.end()
        finally:
            self._streams.discard(stream)
            if not self._streams:
                self._unlisten()
                self._latest = b""

    def stop(self) -> None:
        """The server is being stopped."""
        for stream in self._streams:
            stream.ended.set()

    def _first(self) -> bytes:
        """A page sees where things stand at once."""
        if not self._latest:
            observed = self._services.observed
            if observed is not None:
                self._unlisten = observed.sampler.listen(self._tell)
            self._latest = _event(self._services, None if observed is None else observed.sampler.latest)
        return self._latest

    def _tell(self, sample: Sample) -> None:
        self._latest = event = _event(self._services, sample)
        for stream in self._streams:
            if not self._may_listen(stream.exchange):
                stream.ended.set()
            elif not stream.exchange.full and not stream.exchange.gone:
                stream.exchange.write(event)

    def _may_listen(self, exchange: Exchange) -> bool:
        """Its key or session may have ended since it began. A server that had no keys may have got one."""
        auth = self._services.auth
        return not auth.has_keys or auth.admits_still(exchange, "dashboard")


def _event(services: Services, sample: Sample | None) -> bytes:
    """What the page shows of this second."""
    observed = services.observed
    states = {} if observed is None else observed.states()
    body: dict[str, Any] = {
        "t": time.time() if sample is None else sample.t,
        "values": {} if sample is None else sample.values(),
        "percentiles": {},
        "errors": {},
        "prefix_missed": {},
        "sla": None,
        "backends": [shown_backend(each) | {"state": states.get(each.name)} for each in services.pool.backends],
        "requests": [],
        "alerts": [],
        "firing": [],
    }
    if observed is not None:
        ended = observed.sampler.ended if sample is observed.sampler.latest else []  # of a stalled second: none
        body |= {
            "percentiles": observed.sampler.percentiles(),
            "errors": observed.sampler.errors(),
            "prefix_missed": observed.sampler.prefix_missed(),
            "sla": observed.sla.verdict(),
            "requests": [row_of(seen) for seen in reversed(ended)],
            "alerts": [] if observed.alerts is None else observed.alerts.latest(),
            "firing": [] if observed.alerts is None else observed.alerts.firing(),
        }
    return b"event: second\ndata: %b\n\n" % _encode(body)
