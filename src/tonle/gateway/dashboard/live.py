"""`Live`: the stream of events that keeps the page up to date, one each second.

Does: make each event once for all listeners, leave events out for those that read too slowly, end when the server stops or a
session does. Does not: run while no page is open, or measure anything (`observe/sampler.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from tonle.edge.exchange import EVENT_STREAM, Exchange
from tonle.errors import CapacityError, ShuttingDown
from tonle.gateway.admin import shown_backend
from tonle.gateway.services import Services
from tonle.observe.request_row import row_of
from tonle.observe.seen_request import SeenRequest

if TYPE_CHECKING:
    from tonle.observe.observed import Observed
    from tonle.observe.sample import Sample

MAX_STREAMS = 64
MAX_ROWS = 100  # requests in one event; the page asks for the others
WINDOW_S = 60  # that errors and missed prefixes are counted over
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
        self._events: _Events | None = None  # while there is a listener
        self._hush: Callable[[], None] = lambda: None  # ends listening to the sampler

    async def stream(self, exchange: Exchange) -> None:
        if not self._services.is_open():
            raise ShuttingDown(SHUTTING_DOWN)
        if len(self._streams) >= MAX_STREAMS:
            raise CapacityError(f"{MAX_STREAMS} pages of the dashboard are open; close one", retry_after_s=10)
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
                self._hush()
                self._events = None

    def stop(self) -> None:
        """The server is being stopped."""
        for stream in self._streams:
            stream.ended.set()

    def _first(self) -> bytes:
        """A page sees where things stand at once."""
        if self._events is None:
            self._events = _Events(self._services)
            observed = self._services.observed
            if observed is not None:
                self._hush = observed.sampler.listen(self._tell)
            self._events.make(None if observed is None else observed.sampler.latest)
        return self._events.latest

    def _tell(self, sample: Sample) -> None:
        if self._events is None:
            return
        event = self._events.make(sample)
        for stream in self._streams:
            if not self._may_listen(stream.exchange):
                stream.ended.set()
            elif not stream.exchange.full and not stream.exchange.gone:
                stream.exchange.write(event)

    def _may_listen(self, exchange: Exchange) -> bool:
        """Its key or session may have ended since it began. A server that had no keys may have got one."""
        auth = self._services.auth
        return not auth.has_keys or auth.admits_still(exchange, "dashboard")


class _Events:
    """Makes the events, and remembers what it needs for the next one."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._newest: SeenRequest | None = None  # that an event has told of
        self._errors: deque[tuple[float, Counter[str]]] = deque()  # by the moment of the event
        self._missed: deque[tuple[float, Counter[str]]] = deque()  # counters as they stood
        self.latest = b""
        observed = services.observed
        if observed is not None:
            self._begin(observed)

    def _begin(self, observed: Observed) -> None:
        """Errors of the last minute are known before the first event."""
        now = time.time()
        for seen in reversed(observed.request_log.newest(observed.request_log.most)):
            if seen.error and (ended := seen.arrived + seen.total_s) > now - WINDOW_S:
                self._errors.append((ended, Counter({seen.error: 1})))
        self._newest = next(iter(observed.request_log.newest(1)), None)

    def make(self, sample: Sample | None) -> bytes:
        now, observed = time.time(), self._services.observed
        body: dict[str, Any] = {
            "t": now if sample is None else sample.t,
            "values": {} if sample is None else sample.values(),
            "errors": {},
            "prefix_missed": {},
            "sla": None,
            "backends": self._backends(observed),
            "requests": [],
            "alerts": [],
        }
        if observed is not None:
            ended = self._new_requests(observed)
            body["requests"] = [row_of(seen) for seen in ended[:MAX_ROWS]]
            body["errors"] = self._count_errors(ended, now)
            body["prefix_missed"] = self._count_missed(observed, now)
            body["sla"] = observed.sla.verdict()
            body["alerts"] = [] if observed.alerts is None else observed.alerts.latest()
        self.latest = b"event: second\ndata: %b\n\n" % _encode(body)
        return self.latest

    def _new_requests(self, observed: Observed) -> list[SeenRequest]:
        """Newest first, those that no event has told of."""
        log, last = observed.request_log, self._newest
        count = MAX_ROWS
        found = log.newest(count)
        while last is not None and len(found) == count < log.most and all(seen is not last for seen in found):
            count *= 4
            found = log.newest(count)
        new = []
        for seen in found:
            if seen is last:
                break
            new.append(seen)
        if new:
            self._newest = new[0]
        return new

    def _count_errors(self, ended: list[SeenRequest], now: float) -> dict[str, int]:
        if found := Counter(seen.error for seen in ended if seen.error):
            self._errors.append((now, found))
        while self._errors and self._errors[0][0] < now - WINDOW_S:
            self._errors.popleft()
        return dict(sum((counts for _, counts in self._errors), Counter[str]()))

    def _count_missed(self, observed: Observed, now: float) -> dict[str, int]:
        """Tokens by reason. Counters start again when an engine does: then the window does too."""
        total: Counter[str] = Counter()
        for state in observed.states().values():
            total.update(state.prefix_missed or {})
        if self._missed and any(total[why] < count for why, count in self._missed[-1][1].items()):
            self._missed.clear()
        self._missed.append((now, total))
        while self._missed[0][0] < now - WINDOW_S:
            self._missed.popleft()
        before = self._missed[0][1]
        return {why: count - before[why] for why, count in total.items()}

    def _backends(self, observed: Observed | None) -> list[dict[str, Any]]:
        states = {} if observed is None else observed.states()
        return [
            shown_backend(backend) | {"state": states.get(backend.name)} for backend in self._services.pool.backends
        ]
