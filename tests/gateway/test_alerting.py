"""What a gateway raises alerts about: dead backends, missed targets, alarms of the audit. Posts go to a real webhook."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.webhook_receiver import Receiver, receiver
from tests.gateway.running_gateway import ADMIN, RunningGateway, Upstream, run, running_gateway, until
from tonle.audit.audit_stats import Alarm
from tonle.gateway import alert_sources
from tonle.observe import alerts, sla


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_sources, "INTERVAL_S", 0.02)
    monkeypatch.setattr(alerts, "SUBJECT_PAUSE_S", 0.0)
    monkeypatch.setattr(sla, "_MAX_AGE_S", 0.0)


@asynccontextmanager
async def watched(
    folder: Path, *upstreams: Upstream, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, Receiver]]:
    async with (
        receiver() as place,
        running_gateway(
            folder, *upstreams, alert_webhook=place.url, probe_interval_s=0.05, cache=None, **settings
        ) as gateway,
    ):
        yield gateway, place


def test_a_backend_that_dies_and_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        upstream, other = Upstream("m"), Upstream("m")
        async with watched(tmp_path, upstream, other) as (gateway, place):
            upstream.locked = True  # its list of models is refused: unhealthy
            await until(lambda: place.told == ["b0 firing"], "no alert")
            assert place.data[0]["kind"] == "backend" and "401" in place.data[0]["summary"]
            assert place.data[0]["source"].endswith(gateway.url.rpartition(":")[2])
            upstream.locked = False
            await until(lambda: place.told == ["b0 firing", "b0 resolved"], "it is back")
            metrics = (await gateway.get("/metrics")).text
            assert 'tonle:alerts_total{kind="backend"} 1.0' in metrics
            assert 'tonle:alerts_firing{kind="backend"} 0.0' in metrics
            assert 'tonle:alert_posts_total{result="delivered"} 2.0' in metrics

    run(main())


def test_a_dead_backend_that_is_removed_is_no_longer_a_reason(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with watched(tmp_path, upstream, Upstream("m")) as (gateway, place):
            upstream.locked = True
            await until(lambda: place.told == ["b0 firing"], "no alert")
            auth = {"authorization": f"Bearer {ADMIN}"}
            assert (await gateway.client.delete("/admin/backends/b0", headers=auth)).status_code == 202
            await until(lambda: place.told == ["b0 firing", "b0 resolved"], "the alert goes on")
            assert "was removed" in place.data[1]["summary"]

    run(main())


def test_a_backend_that_is_drained_is_not_dead(tmp_path: Path) -> None:
    async def main() -> None:
        async with watched(tmp_path, Upstream("m"), Upstream("m")) as (gateway, place):
            assert (await gateway.post("/admin/backends/b0/drain")).status_code == 200
            metrics = (await gateway.get("/metrics")).text
            assert 'tonle:backend_up{backend="b0"} 0.0' in metrics
            assert 'tonle:backend_draining{backend="b0"} 1.0' in metrics
            for _ in range(5):
                await gateway.gateway._alert_sources.look()
            assert not place.posts

    run(main())


def test_a_drained_backend_may_be_stopped(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with watched(tmp_path, upstream, Upstream("m")) as (gateway, place):
            backend = gateway.gateway.pool.backends[0]
            assert (await gateway.post("/admin/backends/b0/drain")).status_code == 200
            await upstream.kill()
            await until(lambda: backend.unhealthy_reason is not None, "its end was not noticed")
            await gateway.gateway._alert_sources.look()
            assert not place.posts and not gateway.gateway.alerts.firing()
            assert (await gateway.post("/admin/backends/b0/resume")).status_code == 200
            await until(lambda: place.told == ["b0 firing"], "it is to be used, and is not there")

    run(main())


def test_draining_a_dead_backend_ends_its_alert(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with watched(tmp_path, upstream, Upstream("m")) as (gateway, place):
            await upstream.kill()
            await until(lambda: place.told == ["b0 firing"], "no alert")
            assert (await gateway.post("/admin/backends/b0/drain")).status_code == 200
            await until(lambda: place.told == ["b0 firing", "b0 resolved"], "the alert goes on")
            assert place.data[1]["summary"] == "backend b0 was drained"

    run(main())


def test_a_backend_that_fails_on_everything_is_dead_though_it_is_healthy(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with watched(tmp_path, upstream, breaker_failures=2, breaker_pause_s=30.0) as (gateway, place):
            breaker, passed_s = gateway.gateway.pool.backends[0].breaker, 0.0
            breaker._clock = lambda: passed_s
            upstream.status = 500
            for index in range(4):  # of two callers: one alone never pauses a backend for all
                await gateway.ask(f"{index}", key="key-for-tests" if index % 2 else "admin-for-tests")
            await until(lambda: place.told == ["b0 firing"], "no alert")
            assert "several requests in a row failed" in place.data[0]["summary"]
            passed_s = 30.0
            assert breaker.state == "half open"  # it is not back before a request has succeeded
            await gateway.gateway._alert_sources.look()
            assert len(place.posts) == 1
            upstream.status = 200
            assert (await gateway.ask("good")).status_code == 200
            await until(lambda: place.told == ["b0 firing", "b0 resolved"], "it is back")

    run(main())


def test_a_missed_target_names_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sla, "HOLD_S", 0.1)

    async def main() -> None:
        upstream = Upstream("m")
        upstream.pause_after = 0
        async with watched(tmp_path, upstream, sla_ttft_p95_s=0.05, sla_p95_s=600.0) as (gateway, place):
            asking = [asyncio.create_task(gateway.ask(f"{index}", stream=True)) for index in range(sla.MIN_REQUESTS)]
            await until(lambda: len(upstream.requests) == sla.MIN_REQUESTS, "they are under way")
            await asyncio.sleep(0.1)  # their first token comes late
            upstream.resume.set()
            assert {reply.status_code for reply in await asyncio.gather(*asking)} == {200}
            await until(lambda: place.told == ["ttft firing"], "no alert")
            (told,) = place.data
            assert told["summary"].startswith("TTFT p95 over 50 ms since ")
            assert told["summary"].endswith("queueing or prefill at b0")
            assert told["details"]["burn_rate"] == 20.0 and told["details"]["requests"] == sla.MIN_REQUESTS
            metrics = (await gateway.get("/metrics")).text
            assert 'tonle:sla_met{target="ttft"} 0.0' in metrics and 'tonle:sla_met{target="e2e"} 1.0' in metrics
            assert 'tonle:sla_requests_beyond_total{target="ttft"} 20.0' in metrics
            assert "tonle:meets_sla 1.0" in metrics
            monkeypatch.setattr(sla, "ALLOWED", 1.0)  # as if the slow ones had left the window
            await until(lambda: place.told == ["ttft firing", "ttft resolved"], "it is met again")

    run(main())


def test_alarms_of_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_sources, "NO_MORE_LOST_S", 0.2)

    async def main() -> None:
        async with watched(tmp_path, Upstream("m")) as (gateway, place):
            trail = gateway.gateway.trail
            assert trail is not None
            await asyncio.to_thread(trail._fail, "no space left on device")  # as on the trail's thread
            await until(lambda: place.told[:1] == ["writing firing"], "no alert")
            assert "no space left on device" in place.data[0]["summary"]
            await until(lambda: "writing resolved" in place.told, "the trail found that it can write again")
            await asyncio.to_thread(trail._alarm, Alarm("lost", "3 audit records are lost: disk", 3))
            await until(lambda: place.told[2:] == ["lost records firing", "lost records resolved"], "losses")
            assert place.data[2]["details"] == {"num_lost": 3}

    run(main())
