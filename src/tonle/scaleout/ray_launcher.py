"""`RayLauncher`: replicas as actors of a Ray cluster, each in a placement group of its own.

Does: reserve the GPUs of a replica on one node, start its actor there, find the actors that are there, remove both. Does not:
decide.

Actors and groups are detached and named after their replica: they outlive the controller, and the next one finds them. Each group
is one bundle, so that the GPUs of a tensor-parallel replica are on one node; while no node has them free, the group is what Ray's
own autoscaler sees and adds a node for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from typing import Any

from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import ray
from tonle.bench.server_process import STOP_S
from tonle.scaleout.launcher import Report
from tonle.scaleout.ray_plan import ReplicaSpec, Resources
from tonle.scaleout.ray_replica import RayReplica

log = logging.getLogger("tonle.scaleout")

NAMESPACE = "tonle"
ASK_S = 5.0  # for an actor that runs
_EMPTY = Report()


def controller_name(service: str) -> str:
    return f"{service}/controller"


def replica_name(service: str, id: str) -> str:
    return f"{service}/replica/{id}"


class RayLauncher:
    """In an actor, or a driver, of the namespace `NAMESPACE`."""

    def __init__(self, service: str, spec: ReplicaSpec, resources: Resources) -> None:
        self._service = service
        self._spec = spec
        self._resources = resources
        self._known: dict[str, Report] = {}
        self._asked: dict[str, asyncio.Future[Any]] = {}  # one question to each actor at a time
        self._stopping: dict[str, asyncio.Task[None]] = {}

    async def start(self, id: str) -> None:
        await asyncio.to_thread(self._start, id)

    def _start(self, id: str) -> None:
        name = replica_name(self._service, id)
        group = placement_group([self._resources.bundle()], strategy="STRICT_PACK", name=name, lifetime="detached")
        actor = ray.remote(RayReplica).options(
            name=name, namespace=NAMESPACE, lifetime="detached", max_restarts=0, max_concurrency=4,
            num_cpus=self._resources.cpus, num_gpus=self._resources.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )  # fmt: skip
        actor.remote(self._spec)

    async def reports(self, answering: Collection[str]) -> dict[str, Report]:
        ids = await asyncio.to_thread(self._ids)
        silent = [id for id in ids if id not in answering or id not in self._known]
        await asyncio.gather(*(self._ask(id) for id in silent))
        self._known = {id: self._known.get(id, _EMPTY) for id in ids}
        return self._known | {id: self._known.get(id, _EMPTY) for id in self._stopping}

    def _ids(self) -> list[str]:
        """Of the actors that live or wait for a node."""
        start = replica_name(self._service, "")
        return [name.removeprefix(start) for name in ray.util.list_named_actors() if name.startswith(start)]

    async def _ask(self, id: str) -> None:
        """Into `_known`. An actor that has no node yet does not answer, and is not asked a second time."""
        question = self._asked.get(id)
        if question is None:
            try:
                actor = await asyncio.to_thread(ray.get_actor, replica_name(self._service, id), NAMESPACE)
            except ValueError:  # it ended meanwhile
                return
            question = self._asked[id] = asyncio.ensure_future(_answer(actor.report.remote()))
        done, _ = await asyncio.wait([question], timeout=ASK_S if self._known.get(id, _EMPTY).url else 0.2)
        if not done:
            return
        del self._asked[id]
        try:
            self._known[id] = Report(**question.result())
        except ray.exceptions.RayError as error:
            before = self._known.get(id, _EMPTY)
            self._known[id] = Report(version=before.version, url=before.url, ended=_words(error))

    async def stop(self, id: str) -> None:
        if id not in self._stopping:
            task = self._stopping[id] = asyncio.create_task(self._stop(id))
            task.add_done_callback(lambda _: self._stopping.pop(id, None))

    async def _stop(self, id: str) -> None:
        name = replica_name(self._service, id)
        with contextlib.suppress(ValueError, ray.exceptions.RayError, TimeoutError):
            actor = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            if self._known.get(id, _EMPTY).url is not None:
                async with asyncio.timeout(STOP_S + ASK_S):
                    await actor.stop.remote()
            await asyncio.to_thread(ray.kill, actor)
        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it never had one
            await asyncio.to_thread(lambda: remove_placement_group(get_placement_group(name)))
        if (question := self._asked.pop(id, None)) is not None:
            question.cancel()


async def _answer(reference: Any) -> Any:
    return await reference


def _words(error: Exception) -> str:
    """The last line of Ray's message, which says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
