"""A second backend for a stream that does not begin: off unless asked for, only before the first byte, one record."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running_gateway import RunningGateway, Upstream, run, running_gateway, until

AFTER_S = 0.05


def pair() -> tuple[Upstream, Upstream]:
    """Equal, idle: either may be asked first."""
    return Upstream("m"), Upstream("m")


def hedging(**settings: Any) -> dict[str, Any]:
    return {"prefix_affinity": False, "cache": None, "hedge_after_s": AFTER_S, **settings}


async def first_asked(
    place: RunningGateway, one: Upstream, two: Upstream
) -> tuple[asyncio.Task[Any], Upstream, Upstream]:
    """A stream under way: its task, who was asked, and who was not."""
    task = asyncio.create_task(place.ask(stream=True))
    await until(lambda: one.requests or two.requests, "no backend was asked")
    return (task, one, two) if one.requests else (task, two, one)


def test_it_is_off_by_default(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = pair()
        one.hang.clear()
        two.hang.clear()
        async with running_gateway(tmp_path, one, two, cache=None) as place:
            task, asked, other = await first_asked(place, one, two)
            await asyncio.sleep(AFTER_S * 4)
            assert not other.requests
            asked.hang.set()
            assert (await task).status_code == 200
        assert "hedge" not in place.records()[0]["route"]

    run(main())


def test_the_second_answers_and_the_first_is_sent_away(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = pair()
        one.hang.clear()
        two.hang.clear()
        async with running_gateway(tmp_path, one, two, **hedging()) as place:
            task, slow, quick = await first_asked(place, one, two)
            await until(lambda: quick.requests, "no second was asked")
            assert slow.num_hangups == 0
            quick.hang.set()
            reply = await task
            assert reply.text.count("Penh") == 1 and reply.text.endswith("data: [DONE]\n\n")
            names = {one.url: "b0", two.url: "b1"}
            assert reply.headers["x-tonle-backend"] == names[quick.url]
            await until(lambda: slow.num_hangups == 1, "the loser still works on it")
            assert all(not backend.gate.num_inside for backend in place.gateway.pool.backends)
            assert all(backend.breaker.state == "closed" for backend in place.gateway.pool.backends)
            assert 'tonle:gateway_hedged_requests_total{won_by="second"} 1.0' in (await place.get("/metrics")).text
        (record,) = place.records()
        assert (record["status"], record["route"]["why"]) == ("ok", "hedge")
        assert record["route"]["hedge"] == {"first": names[slow.url], "second": names[quick.url], "after_s": AFTER_S}
        assert record["usage"]["total_tokens"] == 10

    run(main())


def test_the_first_may_still_win(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = pair()
        one.hang.clear()
        two.hang.clear()
        async with running_gateway(tmp_path, one, two, **hedging()) as place:
            task, slow, second = await first_asked(place, one, two)
            await until(lambda: second.requests, "no second was asked")
            slow.hang.set()
            assert "Penh" in (await task).text
            await until(lambda: second.num_hangups == 1, "the loser still works on it")
        route = place.records()[0]["route"]
        assert route["backend"] == route["hedge"]["first"] and route["why"] != "hedge"

    run(main())


def test_whole_answers_are_not_hedged(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = pair()
        one.hang.clear()
        two.hang.clear()
        async with running_gateway(tmp_path, one, two, **hedging()) as place:
            task = asyncio.create_task(place.ask())
            await until(lambda: one.requests or two.requests, "no backend was asked")
            await asyncio.sleep(AFTER_S * 4)
            assert len(one.requests) + len(two.requests) == 1
            one.hang.set()
            two.hang.set()
            assert (await task).status_code == 200

    run(main())


@pytest.mark.parametrize("status", [500, 200])
def test_if_the_first_breaks_the_second_has_it(tmp_path: Path, status: int) -> None:
    async def main() -> None:
        one, two = pair()
        one.hang.clear()
        two.hang.clear()
        async with running_gateway(tmp_path, one, two, **hedging()) as place:
            task, broken, second = await first_asked(place, one, two)
            await until(lambda: second.requests, "no second was asked")
            if status == 500:
                broken.status = 500
                broken.hang.set()
                backends = place.gateway.pool.backends
                await until(lambda: sum(backend.num_failed for backend in backends) == 1, "the first did not break")
            else:
                await broken.kill()
            second.hang.set()
            assert "[DONE]" in (await task).text
        assert place.records()[0]["status"] == "ok"

    run(main())


def test_if_both_fail_there_is_still_one_reply_and_one_record(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = pair()
        one.hang.clear()
        two.hang.clear()
        async with running_gateway(tmp_path, one, two, **hedging(retries=5)) as place:
            task, _, second = await first_asked(place, one, two)
            await until(lambda: second.requests, "no second was asked")
            await one.kill()
            await two.kill()
            reply = await task
            assert reply.status_code == 502 and "b0" in reply.text and "b1" in reply.text
        (record,) = place.records()
        assert record["status"] == "failed" and sorted(record["route"]["failed"]) == ["b0", "b1"]

    run(main())


def test_a_caller_who_hangs_up_ends_both(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = pair()
        one.hang.clear()
        two.hang.clear()
        async with running_gateway(tmp_path, one, two, **hedging()) as place:
            task, _, second = await first_asked(place, one, two)
            await until(lambda: second.requests, "no second was asked")
            task.cancel()
            await until(lambda: one.num_hangups == two.num_hangups == 1, "a backend still works on it")
        assert place.records()[0]["status"] == "cancelled"

    run(main())
