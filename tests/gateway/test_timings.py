"""Where a request's time went: on its record, and in what `/health` says about the latency target."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running_gateway import RunningGateway, Upstream, run, running_gateway, until

TIMES = [("x-queue-time", "0.250000"), ("x-prefill-time", "0.500000"), ("x-decode-time", "2.000000")]
GUESSES = [("x-draft-tokens", "12"), ("x-accepted-tokens", "7")]


def latency(place: RunningGateway) -> dict[str, Any]:
    (record,) = place.records()
    found: dict[str, Any] = record["latency_ms"]
    return found


def test_a_replicas_times_of_a_whole_answer_are_on_record(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m", owned_by="tonle")
        upstream.extra_headers = TIMES + GUESSES
        async with running_gateway(tmp_path, upstream) as place:
            headers = (await place.ask()).headers
            assert headers["x-prefill-time"] == "0.500000"
            assert (headers["x-draft-tokens"], headers["x-accepted-tokens"]) == ("12", "7")
        found = latency(place)
        assert (found["prefill"], found["decode"]) == (500.0, 2000.0)
        assert 250.0 <= found["queue"] < 5000.0
        assert 750.0 <= found["ttft"] < 120_000.0, (
            "from arrival to the first token: queue and prefill, and the way there"
        )

    run(main())


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "soon", "1e300", ""])
def test_times_that_are_none_are_left_out(tmp_path: Path, value: str) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.extra_headers = [(name, value) for name, _ in TIMES]
        async with running_gateway(tmp_path, upstream) as place:
            assert (await place.ask()).status_code == 200
        found = latency(place)
        assert (found["prefill"], found["decode"], found["ttft"]) == (None, None, None)

    run(main())


def test_the_times_of_the_backend_that_answered_count(tmp_path: Path) -> None:
    """Not those of the one that failed before it."""

    async def main() -> None:
        bad, good = Upstream("m"), Upstream("m")
        good.extra_headers = TIMES
        bad.status = 500
        async with running_gateway(tmp_path, bad, good, prefix_affinity=False, cache=None) as place:
            for index in range(2):
                assert (await place.ask(f"{index}")).status_code == 200
        assert [record["latency_ms"]["decode"] for record in place.records()] == [2000.0, 2000.0]

    run(main())


def test_callers_that_gave_up_count_against_the_target(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream, sla_p95_s=2.0, cache=None) as place:
            for index in range(5):
                assert (await place.ask(f"{index}")).status_code == 200
            assert (await place.get("/health")).json()["meets_sla"] is True
            upstream.hang.clear()
            slow = [asyncio.create_task(place.ask(f"slow {index}")) for index in range(5)]
            await until(lambda: len(upstream.requests) == 10, "they never came")
            await asyncio.sleep(2.1)
            for each in slow:
                each.cancel()
            await until(lambda: upstream.num_hangups == 5, "the backend still works on it")
            await until(lambda: not place.gateway.server.num_active, "they are still open")
            report = (await place.get("/health")).json()
            assert report["meets_sla"] is False and report["requests"] == 10
            assert report["why_not"]["mostly"] == "prefill" and report["why_not"]["slow_requests"] == 5
            assert "tonle:meets_sla 0.0" in (await place.get("/metrics")).text

    run(main())


def test_callers_that_left_at_once_say_nothing(tmp_path: Path) -> None:
    """They neither miss the target nor, as quick requests, hide those that do."""

    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream, sla_p95_s=60.0, cache=None) as place:
            asking = [asyncio.create_task(place.ask(f"{index}")) for index in range(3)]
            await until(lambda: len(upstream.requests) == 3, "they never came")
            for each in asking:
                each.cancel()
            await until(lambda: not place.gateway.server.num_active, "they are still open")
            report = (await place.get("/health")).json()
            assert report["meets_sla"] is True and report["requests"] == 0

    run(main())
