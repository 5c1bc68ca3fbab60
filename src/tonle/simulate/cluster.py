"""`Cluster`: servers behind a gateway in virtual time.

Does: let a trace's requests arrive, at their times or as users become free; let servers fail and come back; add and remove them.
Does not: know how a request is sent (`sending.py`), how long steps take, or print.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from functools import partial

from tonle.bench.drive import PAUSE_AFTER_FAILURE_S
from tonle.bench.measure import Sample
from tonle.engine.request import Request
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.routing.router import Router
from tonle.simulate.autoscale import Autoscaler
from tonle.simulate.clock import Clock
from tonle.simulate.fleet import Failure, Fleet, ReplicaOptions
from tonle.simulate.replica import Ended
from tonle.simulate.sending import Sending
from tonle.simulate.server import Server
from tonle.simulate.trace import Trace, TraceRequest

Then = Callable[[Server, Ended], None]
Lost = Callable[[Server, list[float]], None]


class Cluster:
    """Run it once."""

    def __init__(self, fleet: Fleet, trace: Trace, *, seed: int, skip: bool) -> None:
        fleet.check()
        self.fleet = fleet
        self.clock = Clock()
        self.samples: list[Sample] = []
        self.servers: list[Server] = []
        self.counts: list[tuple[float, int]] = []
        self._seed, self._skip = seed, skip
        self._config = fleet.gateway_config
        self._pool = BackendPool([], probe_interval_s=0)
        self.router = Router(self._pool, self._config)
        self.retries = fleet.retries if fleet.has_gateway else 0
        self._by_backend: dict[str, Server] = {}
        self._under_way: dict[int, tuple[Server, Then, Lost]] = {}  # by handle
        self._handles = itertools.count(1)
        self._trace = trace
        self._queue: deque[TraceRequest] = deque()  # closed loop: those that wait for a user
        self._following: dict[int, list[TraceRequest]] = {}
        self._places = _places(trace)
        self._num_under_way = 0  # requests, and those that are still to come
        self._autoscaler = None if fleet.autoscaling is None else Autoscaler(self, fleet.autoscaling)

    def run(self) -> None:
        for options in self.fleet.replicas:
            self.add_server(options, 0.0)
        for failure in self.fleet.failures:
            self.clock.at(failure.at_s, partial(self._fail, failure))
        if self._autoscaler is not None:
            self._autoscaler.start()
        self._let_come()
        self.clock.run(lambda: self._num_under_way == 0 and (not self._queue or self._is_late))
        assert self._num_under_way == 0, "a request was lost"

    # -- requests

    def _let_come(self) -> None:
        for request in self._trace.requests:
            if request.follows is not None:
                self._following.setdefault(request.follows, []).append(request)
            elif request.arrival_s is not None:
                self._num_under_way += 1
                self.clock.at(request.arrival_s, partial(self._begin_turn, request, request.arrival_s))
            else:
                self._queue.append(request)
        for _ in range(self._trace.users or 1):
            self._next_of_user()

    def _next_of_user(self) -> None:
        if self._queue and not self._is_late:
            self._arrive(self._queue.popleft(), None)

    @property
    def _is_late(self) -> bool:
        """Closed loop: no request is sent any more."""
        until_s = self._trace.until_s
        return until_s is not None and self.clock.now >= until_s

    def _arrive(self, request: TraceRequest, due_s: float | None) -> None:
        now = self.clock.now
        self._num_under_way += 1
        sample = Sample(index=request.index, start_s=now, end_s=now, due_s=due_s)
        sample.conversation, sample.turn = self._places.get(request.index, (None, None))
        sending = Sending(self, request, sample)
        if self.fleet.has_gateway and self.fleet.gateway_s:
            self.clock.at(now + self.fleet.gateway_s, sending.start)
        else:
            sending.start()

    def ended(self, request: TraceRequest, sample: Sample) -> None:
        """With an answer, or without one. After a failure, a conversation does not go on."""
        self.samples.append(sample)
        self._num_under_way -= 1
        now = self.clock.now
        following = self._following.pop(request.index, [])
        if following and sample.failure is None and not (sample.due_s is None and self._is_late):
            for turn in following:
                self._num_under_way += 1
                due_s = None if sample.due_s is None else now + turn.pause_s
                self.clock.at(now + turn.pause_s, partial(self._begin_turn, turn, due_s))
        elif sample.due_s is None:
            self.clock.at(now + (PAUSE_AFTER_FAILURE_S if sample.failure else 0.0), self._next_of_user)

    def _begin_turn(self, turn: TraceRequest, due_s: float | None) -> None:
        self._num_under_way -= 1
        if due_s is None and self._is_late:
            return
        self._arrive(turn, due_s)

    # -- servers

    def next_handle(self) -> int:
        return next(self._handles)

    def server_of(self, backend: Backend) -> Server:
        return self._by_backend[backend.name]

    def submit(self, server: Server, request: Request, then: Then, lost: Lost) -> None:
        assert server.replica is not None
        server.under_way.add(request.handle)
        self._under_way[request.handle] = (server, then, lost)
        before_s = server.replica.next_s
        server.replica.submit(request, self.clock.now)
        if server.replica.next_s != before_s:
            self.clock.schedule(server.replica)

    def _on_end(self, server: Server, ended: Ended) -> None:
        server.under_way.discard(ended.handle)
        _, then, _ = self._under_way.pop(ended.handle)
        then(server, ended)

    def add_server(self, options: ReplicaOptions, cold_start_s: float) -> None:
        number, now = len(self.servers), self.clock.now
        server = Server(number, options, self._config, self.clock.seconds, created_s=now,
                        gated=self.fleet.has_gateway, on_end=self._on_end, seed=self._seed,
                        skip=self._skip)  # fmt: skip
        self.servers.append(server)
        self._by_backend[server.backend.name] = server
        if cold_start_s:
            self.clock.at(now + cold_start_s, partial(self._start, server))
        else:
            self._start(server)

    def _start(self, server: Server) -> None:
        if server.removed_s is None:
            server.start(self.clock.now)
            self._pool.backends.append(server.backend)
            self._count()

    def remove_server(self, server: Server) -> None:
        """It finishes what it has, and is gone then."""
        server.backend.draining = True
        self._count()
        self._remove_if_idle(server)

    def _remove_if_idle(self, server: Server) -> None:
        if server.is_idle:
            server.stop(self.clock.now)
            server.removed_s = self.clock.now
            if server.backend in self._pool.backends:
                self._pool.backends.remove(server.backend)
        else:
            self.clock.at(self.clock.now + 1.0, partial(self._remove_if_idle, server))

    def _fail(self, failure: Failure) -> None:
        """The server dies: connections break at once; the gateway's health checks notice at their next turn."""
        server, now = self.servers[failure.replica], self.clock.now
        if server.replica is None:
            return
        published = server.replica.tokens_until_now()
        for handle in server.stop(now):
            _, _, lost = self._under_way.pop(handle)
            lost(server, published.get(handle, []))
        self._count()
        self._at_probe(now, lambda: self._note_health(server))
        if failure.restart_s is not None:
            self.clock.at(now + failure.restart_s, partial(self._restart, server))

    def _restart(self, server: Server) -> None:
        if server.removed_s is not None:
            return  # the autoscaler has removed it meanwhile
        server.start(self.clock.now)
        self._count()
        self._at_probe(self.clock.now, lambda: self._note_health(server))

    def _note_health(self, server: Server) -> None:
        server.backend.unhealthy_reason = "connection refused" if server.replica is None else None

    def _at_probe(self, now: float, call: Callable[[], None]) -> None:
        interval_s = self.fleet.probe_interval_s
        if self.fleet.has_gateway and interval_s:
            self.clock.at((math.floor(now / interval_s) + 1) * interval_s, call)

    def _count(self) -> None:
        up = sum(each.replica is not None and not each.backend.draining for each in self.servers)
        if self.counts and self.counts[-1][0] == self.clock.now:
            self.counts.pop()
        self.counts.append((self.clock.now, up))


def _places(trace: Trace) -> dict[int, tuple[int | None, int | None]]:
    """Of requests in conversations: which conversation, which turn."""
    places: dict[int, tuple[int | None, int | None]] = {}
    followed = {request.follows for request in trace.requests if request.follows is not None}
    num_conversations = 0
    for request in trace.requests:
        if request.follows is not None:
            conversation, turn = places[request.follows]
            assert turn is not None
            places[request.index] = (conversation, turn + 1)
        elif request.index in followed:
            places[request.index] = (num_conversations, 0)
            num_conversations += 1
    return places
