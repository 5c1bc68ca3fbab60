"""Random sets of wanted backends against random requests in flight: none is lost, none is sent to a backend that was removed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gateway.test_policies import request as route_request
from tonle.config.gateway import GatewayConfig
from tonle.config.routing import BackendConfig
from tonle.edge.client import Sink
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.call import ReplyFacts
from tonle.gateway.discovery import fleet as fleet_module
from tonle.gateway.discovery.fleet import Fleet
from tonle.gateway.relay import Relay
from tonle.gateway.routing.router import Router
from tonle.gateway.sending import Sender, SendOptions
from tonle.gateway.stage_results import AcceptedRequest, SendResult

NAMES = ("a", "b", "c", "d")
wanted_sets = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([(1, 1.0), (1, 2.0), (2, 1.0)]), min_size=1)
steps = st.one_of(
    st.tuples(st.just("want"), wanted_sets),  # name -> (which server, weight)
    st.tuples(st.just("ask"), st.integers(1, 4)),
    st.tuples(st.just("answer"), st.integers(1, 3)),
    st.tuples(st.just("turn"), st.integers(1, 3)),
)


class Server:
    """Answers when it is told to. Stands at the other end of one backend."""

    def __init__(self, world: World, backend: Backend) -> None:
        self.world, self.backend = world, backend
        self.left_at: int | None = None
        self.url = backend.row.url

    async def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str], sink: Sink, **bounds: Any
    ) -> None:
        asked_at = int(headers["X-Request-Id"])
        assert not self.backend.gone, f"{self.backend.name} is gone, and was sent a request"
        assert self.url == self.backend.row.url, "it was moved, and its connections were not"
        assert self.left_at is None or asked_at < self.left_at, f"{self.backend.name} was removed before this was asked"
        sink.attach(lambda full: None)
        answered = asyncio.get_running_loop().create_future()
        self.world.waiting.append((self.backend, answered))
        await answered
        sink.head(200, {"content-type": "application/json"})
        sink.data(b'{"choices": []}')

    def close(self) -> None: ...


class World:
    def __init__(self, grace_s: float) -> None:
        self.config = GatewayConfig(
            max_concurrent=2, max_queued=100, probe_interval_s=0.0, backend_drain_s=grace_s, prefix_affinity=False
        )
        self.pool = BackendPool([], probe_interval_s=0)
        self.fleet = Fleet(self.pool, self.config)
        self.sender = Sender(Router(self.pool, self.config).choose, SendOptions(retries=0))
        self.waiting: list[tuple[Backend, asyncio.Future[None]]] = []
        self.clock = itertools.count(1)
        self.asked: list[asyncio.Task[SendResult]] = []
        self.wanted: dict[str, tuple[int, float]] = {}

    def make(self, *arguments: Any, **fields: Any) -> Backend:
        backend = Backend(*arguments, **fields)
        backend.transport = Server(self, backend)
        return backend

    def want(self, wanted: dict[str, tuple[int, float]]) -> None:
        now = next(self.clock)
        before = [backend for backend in self.pool.backends if not backend.leaving]
        self.fleet.reconcile("test", [
            BackendConfig(url=f"http://{name}:{server}", name=name, models=("m",), kind="openai", weight=weight)
            for name, (server, weight) in wanted.items()
        ])  # fmt: skip
        for backend in before:
            if backend.leaving:
                assert isinstance(backend.transport, Server)
                backend.transport.left_at = now
        self.wanted = wanted

    def ask(self) -> None:
        at = next(self.clock)
        exchange: Any = SimpleNamespace(trace=None, header=lambda name: "", on_pressure=None, full=False, elapsed_s=0.0)
        call: Any = SimpleNamespace(request_id=str(at), exchange=exchange, path="/v1/completions")
        accepted: AcceptedRequest = msgspec.structs.replace(route_request().accepted, call=call)
        relay = Relay(exchange, exchange, accepted.request, ReplyFacts(), keep_alive_s=0)
        self.asked.append(asyncio.create_task(self.sender.send(accepted, relay)))

    def answer(self, count: int) -> None:
        for _ in range(count):
            while self.waiting:
                _, first = self.waiting.pop(0)
                if not first.done():  # else it was ended with its backend
                    first.set_result(None)
                    break

    async def finish(self) -> None:
        await asyncio.sleep(0.001)
        assert all(answered.done() for backend, answered in self.waiting if backend.gone), (
            "one that is gone is waited for"
        )
        for _ in range(120_000):
            if all(task.done() for task in self.asked) and not any(each.leaving for each in self.pool.backends):
                return
            self.answer(10)
            await asyncio.sleep(0.001)
        raise AssertionError("something never ends")


async def play(grace_s: float, first: dict[str, tuple[int, float]], moves: list[tuple[str, Any]]) -> None:
    world = World(grace_s)
    original: Callable[..., Backend] = fleet_module.Backend
    fleet_module.Backend = world.make  # type: ignore[misc, assignment]
    try:
        world.want(first)
        for move, value in moves:
            if move == "want":
                world.want(value)
            elif move == "ask":
                for _ in range(value):
                    world.ask()
            elif move == "answer":
                world.answer(value)
            else:
                for _ in range(value):
                    await asyncio.sleep(0)
        await world.finish()
        for task in world.asked:
            sent = task.result()
            assert sent.failure is None and sent.status == 200, sent
        rows = {backend.name: (int(backend.row.url[-1]), backend.row.weight) for backend in world.pool.backends}
        assert rows == world.wanted
        assert all(backend.is_idle for backend in world.pool.backends)
    finally:
        fleet_module.Backend = original  # type: ignore[misc, assignment]
        await world.pool.stop()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([0.0, 1000.0]), wanted_sets, st.lists(steps, max_size=25))
def test_no_request_is_lost_and_none_goes_to_a_backend_that_was_removed(
    grace_s: float, first: dict[str, tuple[int, float]], moves: list[tuple[str, Any]]
) -> None:
    asyncio.run(play(grace_s, first, moves))
