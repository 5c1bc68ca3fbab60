"""`RayController`: the actor that runs a `Controller` on the head of a Ray cluster.

Does: start its loop and its list of replicas, answer `tonle ray status` and `tonle ray down`. Does not: decide (`controller.py`).
If it dies, Ray starts it again with the same settings, and it finds the replicas.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tonle.scaleout.controller import Controller
from tonle.scaleout.ray_launcher import RayLauncher
from tonle.scaleout.ray_plan import RayPlan
from tonle.scaleout.replica_list import ReplicaList
from tonle.telemetry import logs


class RayController:
    """Ray runs its constructor, which is a coroutine, on the event loop of its methods."""

    async def __init__(self, plan: RayPlan) -> None:  # type: ignore[misc]
        """Raises `ConfigError` if the port of its list is taken."""
        import ray.util

        logs.configure("INFO", json=False)
        launcher = RayLauncher(plan.controller.name, plan.spec, plan.resources)
        self._controller = Controller(launcher, plan.controller)
        self._list = ReplicaList(self._controller.listed)
        await self._list.start(ray.util.get_node_ip_address(), plan.list_port)
        self._loop = asyncio.create_task(self._controller.run())

    async def status(self) -> dict[str, Any]:
        return self._controller.status() | {"list_url": self._list.url}

    async def close(self) -> None:
        """Drain and stop all replicas. Returns at once: `status` tells when none is left."""
        self._controller.close()
