"""What the gateway holds does not grow with the number of requests, nor when records cannot be written fast enough."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.gateway.running_gateway import CHAT, JSON, KEY, RunningGateway, Upstream, run, running_gateway, until
from tonle.audit.disk import locked
from tonle.edge.exchange import Exchange
from tonle.gateway.relay import Relay
from tonle.observe import request_log, sampler, sla, target_window
from tonle.observe.request_log import RequestLog
from tonle.protocol.answers import Collector

# asyncio keeps up to a hundred cancelled timers, with what hangs on them.
TIMERS = ("TimerHandle", "Context", "ReferenceType", "builtin_function_or_method")


def objects() -> Counter[str]:
    """Those the collector knows, by kind, when nothing is under way."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__name__ not in TIMERS)


async def many(place: RunningGateway, upstream: Upstream, count: int) -> None:
    """Answered whole and streamed, refused by key, by body and by model."""
    trail = place.gateway.trail
    assert trail is not None
    for number in range(count // 5):
        wrong = place.client.post(CHAT, content=b"{", headers=JSON | {"authorization": f"Bearer {KEY}"})
        await asyncio.gather(place.ask(temperature=0.5), place.ask(stream=True, temperature=0.5),
                             place.ask(key=f"wrong-{number}"), place.ask(model="missing"), wrong)  # fmt: skip
    await until(lambda: not trail.num_open, "requests are still open")
    assert await asyncio.to_thread(trail.flush, 60)
    assert place.gateway.observed is not None
    place.gateway.observed.count()  # up to 250 requests wait for that, as long as a second lasts
    upstream.requests.clear()
    upstream.headers.clear()


def test_objects_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR", "tonle")  # pytest keeps records; an engine of another test may have asked for INFO
    monkeypatch.setattr(sla, "WINDOW", 50)  # the latest calls, which are kept on purpose,
    monkeypatch.setattr(target_window, "MOST_UNCOUNTED", 5)  # or not counted yet
    monkeypatch.setattr(sampler, "RECENT_S", 5)  # and the latest seconds, of which a busy machine needs many
    monkeypatch.setattr(RequestLog.__init__, "__defaults__", (50,))
    monkeypatch.setattr(request_log, "MOST_UNKNOWN", 20)

    async def main() -> None:
        upstream = Upstream("m")
        # Refusals beyond a rate would be counted, and remembered for some seconds.
        rates = {"audit_refused_per_address": 10**6, "audit_refused_per_second": 10**6}
        async with running_gateway(tmp_path, upstream, **rates) as place:
            await many(place, upstream, 150)
            before = objects()
            await many(place, upstream, 400)
            grown = objects() - before
            # One object left behind by each request of one sort would be 80.
            assert not {kind: count for kind, count in grown.items() if count > 60}, grown.most_common(5)
            trail = place.gateway.trail
            assert trail is not None and not trail._open and not trail.num_queued
            assert all(not backend.gate._inside and not backend.gate._queues for backend in place.gateway.pool.backends)

    run(main())


def test_callers_wait_for_a_slow_writer_and_all_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.gateway.recording.ROOM_S", 120.0)

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), audit_max_queue=8, audit_linger_s=0.0) as place:
            trail = place.gateway.trail
            assert trail is not None
            with locked(tmp_path / "audit"):  # no writer gets the lock
                served = [await place.ask(temperature=0.5)]
                await until(lambda: not trail.num_queued, "the first record is not taken")  # and then waits with it
                while not trail.crowded:
                    served.append(await place.ask(temperature=0.5))
                    assert len(served) < 50, "records were written nevertheless"
                waiting = [asyncio.create_task(place.ask(temperature=0.5)) for _ in range(20)]
                waiting.append(asyncio.create_task(place.ask(key="wrong")))  # a refusal is a record too
                await asyncio.sleep(0.3)
                assert not any(task.done() for task in waiting)
            replies = served + list(await asyncio.gather(*waiting))
        assert [reply.status_code for reply in replies] == [200] * (len(served) + 20) + [401]
        assert len(place.records()) == len(replies)

    run(main())


def test_nothing_of_a_refused_request_waits_for_the_collector(tmp_path: Path) -> None:
    """An error's traceback holds the frames it came through, and with them the body: a cycle must not."""

    def held() -> int:
        return sum(isinstance(each, Exchange) for each in gc.get_objects())

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), max_body_bytes=100_000, audit_linger_s=0.0) as place:
            trail, key = place.gateway.trail, {"authorization": f"Bearer {KEY}"}
            assert trail is not None
            assert (await place.ask()).status_code == 200
            gc.collect()
            gc.disable()
            try:
                before = held()
                for _ in range(10):
                    for path, content, headers, status in (
                        (CHAT, b"{" * 90_000, JSON | key, 400), (CHAT, b"x" * 90_000, JSON, 401), (CHAT, b"{}", key, 415),
                        (CHAT, b"x" * 200_000, JSON | key, 413), ("/nothing", b"x" * 90_000, JSON | key, 404),
                        ("/admin/keys", b"{", JSON | key, 403), (CHAT, b'{"model": "missing"}', JSON | key, 404),
                    ):  # fmt: skip
                        assert (await place.client.post(path, content=content, headers=headers)).status_code == status
                await until(lambda: not trail.num_open, "requests are still open")
                assert await asyncio.to_thread(trail.flush, 60)
                assert held() <= before + 2
            finally:
                gc.enable()

    run(main())


def test_nothing_of_a_request_whose_caller_left_waits_for_the_collector(tmp_path: Path) -> None:
    def held() -> int:
        return sum(isinstance(each, Exchange | Relay | Collector) for each in gc.get_objects())

    async def main() -> None:
        upstream = Upstream("m")
        upstream.pause_after = 2
        async with running_gateway(tmp_path, upstream, audit_linger_s=0.0) as place:
            trail = place.gateway.trail
            assert trail is not None
            gc.collect()
            gc.disable()
            try:
                before = held()
                for _ in range(10):
                    reader, writer = await asyncio.open_connection("127.0.0.1", int(place.url.rpartition(":")[2]))
                    writer.write(chat_bytes(stream=True))
                    await reader.readuntil(b"Penh")
                    writer.close()
                    await until(lambda: not trail.num_open, "it is still open")
                assert await asyncio.to_thread(trail.flush, 60)
                upstream.server.end_requests()
                await until(lambda: not upstream.server.num_handled, "the backend works on")
                assert held() <= before + 2
            finally:
                gc.enable()

    run(main())


def chat_bytes(**fields: object) -> bytes:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}).encode()
    return (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body))  # fmt: skip
