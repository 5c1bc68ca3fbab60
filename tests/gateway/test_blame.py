"""Whose fault a failure is: a request that no backend can take must not take backends from other callers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running_gateway import ADMIN, KEY, RunningGateway, Upstream, run, running_gateway
from tonle.edge.client import Sink, UpstreamError

PLAIN: dict[str, Any] = {"prefix_affinity": False, "cache": None}


def poisoned(how: str, count: int) -> list[Upstream]:
    upstreams = [Upstream("m") for _ in range(count)]
    for upstream in upstreams:
        upstream.poison = how
    return upstreams


def poison_sent(upstreams: list[Upstream]) -> int:
    return sum("poison" in str(body) for upstream in upstreams for body in upstream.requests)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("how", ["500", "cut", "hang"])
def test_no_number_of_poisoned_requests_takes_a_backend_from_others(
    tmp_path: Path, how: str, count: int, *, stream: bool
) -> None:
    async def main() -> None:
        upstreams = poisoned(how, count)
        num_poisoned = 4 * count
        settings = {**PLAIN, "breaker_failures": 2, "backend_timeout_s": 0.4 if how == "hang" else 60.0}
        async with running_gateway(tmp_path, *upstreams, **settings) as place:
            status = {"500": 500, "cut": 502, "hang": 504}[how]
            for number in range(num_poisoned):
                assert (await place.ask(f"poison {number}", stream=stream)).status_code == status
            assert poison_sent(upstreams) <= num_poisoned * (1 if how == "hang" else 2), (
                "more than one other backend was tried"
            )
            for backend in place.gateway.pool.backends:
                backend.timeout_s = 60.0  # a good answer may take its time on a busy machine
            for number in range(3 * count):  # another key, and the same key with another request
                assert (await place.ask(f"question {number}", key=ADMIN)).status_code == 200
                assert (await place.ask(f"question {number}")).status_code == 200
            assert (await place.get("/health")).json()["backends"] == {"available": count, "all": count}

    run(main())


def test_poison_between_good_requests_of_another_key_costs_them_nothing(tmp_path: Path) -> None:
    """One backend takes the request, the other does not: a failure each time, and always of the same key."""

    async def main() -> None:
        picky, other = Upstream("m"), Upstream("m")
        picky.poison = "500"
        async with running_gateway(tmp_path, picky, other, **PLAIN, breaker_failures=2) as place:
            for number in range(12):
                assert (await place.ask(f"poison {number}")).status_code == 200
            before = len(picky.requests)
            for number in range(6):
                assert (await place.ask(f"question {number}", key=ADMIN)).status_code == 200
            assert len(picky.requests) > before, "the other key no longer gets this backend"

    run(main())


@pytest.mark.parametrize("keys", [(KEY,), (KEY, ADMIN)])
def test_a_backend_that_fails_on_everything_is_paused(tmp_path: Path, keys: tuple[str, ...]) -> None:
    async def main() -> None:
        good, bad = Upstream("m"), Upstream("m")
        bad.status = 500
        async with running_gateway(tmp_path, good, bad, **PLAIN, breaker_failures=3) as place:
            for number in range(12):
                assert (await place.ask(f"question {number}", key=keys[number % len(keys)])).status_code == 200
            assert len(bad.requests) == 3
            backend = place.gateway.pool.backends[1]
            assert backend.breaker.state == "open" and backend.available is (len(keys) == 1)

    run(main())


def test_a_backend_that_cannot_be_reached_is_paused_for_all(tmp_path: Path) -> None:
    async def main() -> None:
        good, dead = Upstream("m"), Upstream("m")
        async with running_gateway(tmp_path, good, dead, **PLAIN, breaker_failures=2) as place:
            await dead.kill()
            for number in range(6):
                assert (await place.ask(f"question {number}")).status_code == 200
            assert not place.gateway.pool.backends[1].available

    run(main())


def test_a_request_that_fails_is_tried_on_one_other_backend_and_a_busy_one_on_all(tmp_path: Path) -> None:
    async def main() -> None:
        upstreams = [Upstream("m") for _ in range(4)]
        async with running_gateway(tmp_path, *upstreams, **PLAIN, retries=3) as place:
            for status, tried in ((500, 2), (502, 2), (503, 4), (429, 4), (504, 1), (400, 1)):
                for upstream in upstreams:
                    upstream.status = status
                    upstream.requests.clear()
                assert (await place.ask(f"{status}")).status_code == status
                assert sum(len(upstream.requests) for upstream in upstreams) == tried

    run(main())


def test_errors_of_callers_do_not_hide_that_a_backend_is_broken(tmp_path: Path) -> None:
    async def main() -> None:
        good, bad = Upstream("m"), Upstream("m")
        async with running_gateway(tmp_path, good, bad, **PLAIN, breaker_failures=3) as place:
            for number in range(6):
                bad.status = 500
                assert (await place.ask(f"question {number}")).status_code == 200
                good.status, bad.status = 400, 400
                await asyncio.gather(*(place.ask(f"wrong {number} {index}") for index in range(2)))
                good.status = 200
            assert place.gateway.pool.backends[1].breaker.state == "open"

    run(main())


# -- deadlines


class EarlyTimer:
    """Replaces a backend's transport: the bound on the first byte passes, by a clock that is a moment ahead."""

    async def send(self, method: str, path: str, body: bytes, headers: dict[str, str], sink: Sink, *, first_s: float,
                   silence_s: float) -> None:  # fmt: skip
        sink.attach(lambda full: None)
        await asyncio.sleep(first_s / 2)
        raise UpstreamError("timeout", f"nothing came for {first_s:g} s")

    def close(self) -> None: ...


def test_a_deadline_is_never_the_backends_fault_however_the_timers_race(tmp_path: Path) -> None:
    async def main() -> None:
        upstreams = Upstream("m"), Upstream("m")
        async with running_gateway(tmp_path, *upstreams, **PLAIN, breaker_failures=2) as place:
            for backend in place.gateway.pool.backends:
                backend.transport = EarlyTimer()
            for _ in range(4):
                reply = await place.ask(headers={"x-request-deadline-ms": "500"})
                assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
            backends = place.gateway.pool.backends
            assert [(each.breaker.state, each.num_failed) for each in backends] == [("closed", 0)] * 2
            assert sum(each.num_sent for each in backends) == 4, "it was sent to another backend, too"

    run(main())


def test_short_deadlines_on_the_event_loop_of_production(tmp_path: Path) -> None:
    async def main() -> None:
        upstreams = Upstream("m"), Upstream("m")
        for upstream in upstreams:
            upstream.hang.clear()
        async with running_gateway(tmp_path, *upstreams, **PLAIN, breaker_failures=2) as place:
            for number in range(28):
                reply = await place.ask(f"{number}", headers={"x-request-deadline-ms": "20"}, stream=bool(number % 2))
                assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
            for upstream in upstreams:
                upstream.hang.set()
            for number in range(4):
                assert (await place.ask(f"question {number}")).status_code == 200
            assert all(backend.num_failed == 0 for backend in place.gateway.pool.backends)

    run(main())


def test_a_deadline_also_bounds_the_wait_for_a_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with full_backlog() as url:
            upstream = Upstream("m")
            async with running_gateway(tmp_path, upstream, **PLAIN, retries=0) as place:
                point_to(place, url)
                reply = await place.ask(headers={"x-request-deadline-ms": "100"})
                assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
                assert place.gateway.pool.backends[0].num_failed == 0

    run(main())


class full_backlog:  # noqa: N801
    """An address where connecting never ends: its queue of connections is full."""

    async def __aenter__(self) -> str:
        import socket

        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        host, port = self._listener.getsockname()
        self._waiting = [socket.socket() for _ in range(4)]
        for each in self._waiting:
            each.setblocking(False)
            each.connect_ex((host, port))
        await asyncio.sleep(0.05)
        return f"http://{host}:{port}"

    async def __aexit__(self, *_: object) -> None:
        for each in (*self._waiting, self._listener):
            each.close()


def point_to(place: RunningGateway, url: str) -> None:
    from tonle.edge.client import Address, HttpClient
    from tonle.gateway.backends.transport import HttpTransport

    place.gateway.pool.backends[0].transport = HttpTransport(HttpClient(Address.parse(url)))


# -- timeouts


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_is_a_504_and_goes_to_no_other_backend(tmp_path: Path, *, stream: bool) -> None:
    async def main() -> None:
        upstreams = Upstream("m"), Upstream("m")
        for upstream in upstreams:
            upstream.hang.clear()
        async with running_gateway(tmp_path, *upstreams, **PLAIN, backend_timeout_s=0.2, retries=3) as place:
            reply = await place.ask(stream=stream)
            assert (reply.status_code, reply.json()["error"]["code"]) == (504, "upstream_timeout")
            assert sum(len(upstream.requests) for upstream in upstreams) == 1
        (record,) = place.records()
        assert (record["status"], record["http_status"]) == ("failed", 504)

    run(main())
