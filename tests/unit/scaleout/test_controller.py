"""The controller with replicas that are fakes: what it starts, lists, drains and stops, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from tonle.scaleout import controller as module
from tonle.scaleout.controller import UNLISTED_S, Controller, ControllerSettings
from tonle.scaleout.demand import ReplicaLoad, ScaleLimits
from tonle.scaleout.launcher import Report


class FakeReplica:
    def __init__(self, id: str, version: str) -> None:
        self.report = Report(version=version, url=f"http://10.0.0.1:{9000 + int(id, 16) % 1000}")
        self.is_ready = False
        self.load: ReplicaLoad | None = ReplicaLoad()


class FakeLauncher:
    """Replicas live here, as they do in a cluster: controllers come and go."""

    def __init__(self) -> None:
        self.replicas: dict[str, FakeReplica] = {}
        self.version = "v1"
        self.events: list[str] = []
        self.breaks = False  # replicas of now end before they are ready

    async def start(self, id: str) -> None:
        self.events.append(f"start {self.version}")
        self.replicas[id] = FakeReplica(id, self.version)
        if self.breaks:
            self.replicas[id].report = Report(version=self.version, ended="no such model")

    async def reports(self, answering: Collection[str]) -> dict[str, Report]:
        return {id: replica.report for id, replica in self.replicas.items()}

    async def stop(self, id: str) -> None:
        replica = self.replicas.pop(id)
        self.events.append(f"stop {replica.report.version}")

    def make_ready(self) -> None:
        for replica in self.replicas.values():
            replica.is_ready = replica.report.ended is None


class World:
    """A controller whose clock is a number, and whose probes look at the fakes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launcher = FakeLauncher()
        self.now_s = 0.0
        launcher = self.launcher

        class Probe:
            def __init__(self, url: str, *, api_key: str | None) -> None:
                self._url = url

            def _find(self) -> FakeReplica | None:
                return next((each for each in launcher.replicas.values() if each.report.url == self._url), None)

            async def is_ready(self) -> bool:
                found = self._find()
                return found is not None and found.is_ready

            async def load(self) -> ReplicaLoad | None:
                found = self._find()
                return None if found is None else found.load

            def close(self) -> None:
                pass

        monkeypatch.setattr(module, "ReplicaProbe", Probe)

    def controller(self, *, least: int = 1, most: int = 4, version: str = "v1", surge: int = 1) -> Controller:
        self.launcher.version = version
        scale = ScaleLimits(
            min_replicas=least, max_replicas=most, waiting_requests=5, max_use=0.8, max_num_seqs=10, up_delay_s=2,
            down_delay_s=20,
        )  # fmt: skip
        settings = ControllerSettings(
            name="s", version=version, scale=scale, max_surge=surge, start_timeout_s=100, drain_timeout_s=50
        )
        return Controller(self.launcher, settings, clock=lambda: self.now_s)

    async def look(self, controller: Controller, seconds: int = 1, *, ready: bool = True) -> None:
        for _ in range(seconds):
            if ready:
                self.launcher.make_ready()
            await controller.look()
            self.now_s += 1.0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def names(controller: Controller) -> set[str]:
    return {str(row.name) for row in controller.listed() or ()}


def states(controller: Controller) -> list[str]:
    return sorted(each["state"] for each in controller.status()["replicas"])


def run(main: Any) -> None:
    asyncio.run(main)


def test_a_list_is_not_told_before_the_first_look(world: World) -> None:
    async def main() -> None:
        controller = world.controller()
        assert controller.listed() is None  # an empty list would have gateways remove all backends
        await world.look(controller)
        assert controller.listed() == []  # one was started, and is not ready
        await world.look(controller)
        (row,) = controller.listed() or ()
        assert (
            row.kind == "tonle" and row.max_concurrent == 20
        )  # twice max_num_seqs: the rest waits where it is counted

    run(main())


def test_load_adds_replicas_and_quiet_removes_them_after_a_drain(world: World) -> None:
    async def main() -> None:
        controller = world.controller()
        await world.look(controller, 3)
        for replica in world.launcher.replicas.values():
            replica.load = ReplicaLoad(running=10, waiting=11)
        await world.look(controller, 5)
        assert states(controller) == ["ready"] * 3
        for replica in world.launcher.replicas.values():
            replica.load = ReplicaLoad(running=1)
        await world.look(controller, 21)
        assert states(controller) == ["draining", "draining", "ready"]
        assert len(names(controller)) == 1
        await world.look(controller, int(UNLISTED_S) + 5)
        assert "stop v1" not in world.launcher.events  # their requests are not done
        for replica in world.launcher.replicas.values():
            replica.load = ReplicaLoad()
        await world.look(controller)
        assert world.launcher.events.count("stop v1") == 2

    run(main())


def test_a_drain_that_takes_too_long_ends(world: World) -> None:
    async def main() -> None:
        controller = world.controller(least=2, most=2)
        await world.look(controller, 3)
        for replica in world.launcher.replicas.values():
            replica.load = ReplicaLoad(running=1)
        controller.close()
        await world.look(controller, 49)
        assert world.launcher.events.count("stop v1") == 0
        await world.look(controller, 3)
        assert world.launcher.replicas == {}
        assert controller.num_replicas == 0

    run(main())


def test_a_new_controller_finds_the_replicas_of_the_one_before(world: World) -> None:
    async def main() -> None:
        first = world.controller(least=2)
        await world.look(first, 3)
        second = world.controller(least=2)
        await world.look(second)
        assert names(second) == names(first)
        assert world.launcher.events == ["start v1", "start v1"]

    run(main())


@pytest.mark.parametrize("surge", [0, 1, 2])
def test_new_settings_replace_all_and_someone_always_answers(world: World, surge: int) -> None:
    async def main() -> None:
        await world.look(world.controller(least=3, most=3), 4)
        controller = world.controller(least=3, most=3, version="v2", surge=surge)
        for _ in range(60):
            await world.look(controller)
            assert len(names(controller)) >= (3 if surge else 2)
            assert len(world.launcher.replicas) <= 3 + surge + 3  # with those that drain
        assert {each.report.version for each in world.launcher.replicas.values()} == {"v2"}
        assert len(names(controller)) == 3

    run(main())


def test_settings_that_do_not_start_change_nothing_and_are_tried_less_and_less(world: World) -> None:
    async def main() -> None:
        first = world.controller(least=2, most=2)
        await world.look(first, 3)
        before = names(first)
        controller = world.controller(least=2, most=2, version="v2")
        world.launcher.breaks = True
        await world.look(controller, 200)
        assert names(controller) == before
        assert "no such model" in controller.status()["problem"]
        assert world.launcher.events.count("start v2") <= 8
        world.launcher.breaks = False
        await world.look(controller, 400)
        assert controller.status()["problem"] is None
        assert {each.report.version for each in world.launcher.replicas.values()} == {"v2"}

    run(main())


def test_what_dies_is_replaced(world: World) -> None:
    async def main() -> None:
        controller = world.controller(least=2, most=2)
        await world.look(controller, 3)
        gone = next(iter(world.launcher.replicas))
        del world.launcher.replicas[gone]  # with its node
        await world.look(controller, 3)
        assert len(names(controller)) == 2 and f"s-{gone}" not in names(controller)
        assert controller.status()["problem"] is None  # it had been ready: its settings are good

    run(main())


def test_one_that_never_becomes_ready_is_stopped_and_one_without_a_node_is_waited_for(world: World) -> None:
    async def main() -> None:
        controller = world.controller()
        await world.look(controller, ready=False)
        (replica,) = world.launcher.replicas.values()
        placed, replica.report = replica.report, Report()  # no GPU is free
        await world.look(controller, 300, ready=False)
        assert world.launcher.events == ["start v1"]
        replica.report = placed
        await world.look(controller, 90, ready=False)
        assert world.launcher.events == ["start v1"]
        await world.look(controller, 15, ready=False)
        assert world.launcher.events[:2] == ["start v1", "stop v1"]

    run(main())


def test_one_that_is_not_ready_for_a_moment_stays_listed(world: World) -> None:
    async def main() -> None:
        controller = world.controller(least=2, most=2)
        await world.look(controller, 3)
        before = names(controller)
        for replica in world.launcher.replicas.values():
            replica.is_ready = False
        await world.look(controller, 20, ready=False)
        assert names(controller) == before
        assert len(world.launcher.replicas) == 2

    run(main())


def test_an_idle_replica_is_stopped_only_when_gateways_have_seen_it_leave_the_list(world: World) -> None:
    async def main() -> None:
        controller = world.controller()
        await world.look(controller, 3)
        controller.close()
        await world.look(controller, int(UNLISTED_S))
        assert names(controller) == set()
        assert "stop v1" not in world.launcher.events  # a request may be on its way
        await world.look(controller, 2)
        assert world.launcher.events[-1] == "stop v1"

    run(main())
