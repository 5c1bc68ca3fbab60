"""Alerts about what is in this process name the part that is dead: its engine, or one of its worker pools. One that sleeps is
not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec

from tonle.audit.audit_stats import Alarm
from tonle.gateway.alert_sources import NO_MORE_LOST_S, AlertSources
from tonle.observe.alerts import Alerts


class Local:
    """A backend of this process that says of itself what a test wants."""

    name, local, leaving = "local", True, False

    def __init__(self) -> None:
        self.page: dict[str, Any] = {"status": "ready"}

    async def send(self, method: str, path: str, body: bytes, headers: Any, sink: Any, *, first_s: float) -> None:
        sink.head(200 if self.page["status"] == "ready" else 503, {})
        sink.data(msgspec.json.encode(self.page))


class Told:
    """In place of `Alerts`, and of `Sla`, whose targets are all met."""

    targets = ()

    def __init__(self) -> None:
        self.said: list[str] = []

    def verdict(self) -> Told:
        return self

    def fire(self, kind: str, subject: str, text: str, details: Any = None) -> None:
        self.said.append(text)

    def resolve(self, kind: str, subject: str, text: str) -> None:
        self.said.append(text)


def test_the_part_of_this_process_that_is_dead_is_named() -> None:
    async def main() -> None:
        backend: Any = Local()
        told: Any = Told()
        sources = AlertSources(told, told, [backend])
        ready = {"status": "ready"}
        for page in (
            ready,
            {"status": "not ready", "reason": "tts: its worker could not start", "pool": "tts"},
            ready,
            {"status": "not ready", "reason": "the engine died"},
            ready,
        ):
            backend.page = page
            await sources.look()
        assert told.said == [
            "the engine answers again",
            "the worker pool tts is dead: its worker could not start",
            "the worker pool tts answers again",
            "the engine is dead: the engine died",
            "the engine answers again",
        ]

    asyncio.run(main())


def test_an_engine_that_sleeps_is_not_dead() -> None:
    async def main() -> None:
        backend: Any = Local()
        told, sleeper = Told(), SimpleNamespace(is_sleeping=False)
        sources = AlertSources(told, told, [backend], sleeper=sleeper)  # type: ignore[arg-type]
        asleep = {"status": "not ready", "reason": "it sleeps, and must be woken first"}
        for is_sleeping, page in ((False, {"status": "ready"}), (True, asleep), (False, {"status": "ready"})):
            sleeper.is_sleeping, backend.page = is_sleeping, page
            await sources.look()
        assert "dead" not in str(told.said)
        backend.page = {"status": "not ready", "reason": "the engine died"}
        await sources.look()
        assert told.said[-1] == "the engine is dead: the engine died"

    asyncio.run(main())


def test_records_that_are_lost_one_after_the_other_are_added_up() -> None:
    async def main() -> None:
        alerts, told = Alerts(), Told()
        now_s = 0.0
        sources = AlertSources(alerts, told, [], clock=lambda: now_s)  # type: ignore[arg-type]
        for count in (5, 3):
            sources._take_alarm(Alarm("lost", f"{count} audit records are lost: disk", count))
        (firing,) = alerts.firing()
        assert firing.summary == "3 audit records are lost: disk; 8 since this began"
        assert alerts._subjects["audit", "lost records"].details == {"num_lost": 8}
        now_s += NO_MORE_LOST_S
        await sources.look()
        assert not alerts.firing()
        sources._take_alarm(Alarm("lost", "2 audit records are lost: disk", 2))
        assert [alert.summary for alert in alerts.firing()] == ["2 audit records are lost: disk"]

    asyncio.run(main())
