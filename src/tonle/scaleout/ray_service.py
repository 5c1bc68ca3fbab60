"""`RayService`: one service on a Ray cluster, as `tonle ray` sees it from outside.

Does: connect, start or replace the controller, ask it, take everything down. Does not: look after replicas (`ray_controller.py`).
"""

from __future__ import annotations

import time
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from tonle.errors import CallerError
from tonle.scaleout.ray_controller import RayController
from tonle.scaleout.ray_launcher import NAMESPACE, controller_name, replica_name
from tonle.scaleout.ray_plan import RayPlan

ASK_S = 30.0
_HEAD = "node:__internal_head__"  # a resource that only the head has
_GONE_S = 30.0  # for the name of a controller that was killed to be free again
_POLL_S = 0.2


class RayService:
    def __init__(self, name: str, address: str) -> None:
        """Connects. Raises `CallerError` if there is no cluster."""
        self.name = name
        try:
            ray.init(
                address=address, namespace=NAMESPACE, ignore_reinit_error=True, log_to_driver=False,
                logging_level="ERROR", configure_logging=False,
            )  # fmt: skip
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise CallerError(
                f"there is no Ray cluster at {address} ({str(error).splitlines()[0]}); start one with `ray start --head`, or "
                "give --address HOST:6379"
            ) from error

    def disconnect(self) -> None:
        """What runs on the cluster goes on."""
        ray.shutdown()

    @property
    def num_gpus(self) -> int:
        return int(ray.cluster_resources().get("GPU", 0))

    def up(self, plan: RayPlan) -> str:
        """Start the service, or give it new settings. Returns the URL of the list of replicas. Replicas of a controller that
        was there before stay, until the new one replaces them."""
        self._kill_controller()
        actor = ray.remote(RayController).options(
            name=controller_name(self.name), namespace=NAMESPACE, lifetime="detached", num_cpus=0,
            max_restarts=-1, max_task_retries=3,
            scheduling_strategy=NodeAffinitySchedulingStrategy(_head_node(), soft=False),
        )  # fmt: skip
        controller = actor.remote(plan)
        try:
            return str(ray.get(controller.status.remote(), timeout=ASK_S)["list_url"])
        except ray.exceptions.RayError as error:
            ray.kill(controller)
            reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            raise CallerError(f"the controller did not start: {reason}") from error

    def status(self) -> dict[str, Any]:
        """Raises `CallerError` if the service does not run."""
        controller = self._controller()
        if controller is None:
            raise CallerError(f"there is no service {self.name} on this cluster; start it with `tonle ray up`")
        facts: dict[str, Any] = self._ask(controller.status)
        return facts

    def close(self) -> None:
        """All replicas are drained and stopped from now on; `status` shows those that are left."""
        controller = self._controller()
        if controller is not None:
            self._ask(controller.close)

    def remove(self) -> None:
        """What is left: the controller, and replicas that it did not end."""
        self._kill_controller()
        start = replica_name(self.name, "")
        for name in ray.util.list_named_actors():
            if name.startswith(start):
                ray.kill(ray.get_actor(name, NAMESPACE))
        for group in ray.util.placement_group_table().values():
            if group["name"].startswith(start) and group["state"] != "REMOVED":
                ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))

    def _ask(self, method: Any) -> Any:
        try:
            return ray.get(method.remote(), timeout=ASK_S)
        except ray.exceptions.RayError as error:
            raise CallerError(f"the controller of {self.name} does not answer: {error}") from error

    def _controller(self) -> Any | None:
        try:
            return ray.get_actor(controller_name(self.name), NAMESPACE)
        except ValueError:
            return None

    def _kill_controller(self) -> None:
        controller = self._controller()
        if controller is None:
            return
        ray.kill(controller)
        ends_s = time.monotonic() + _GONE_S
        while self._controller() is not None:
            if time.monotonic() > ends_s:
                raise CallerError(f"the controller of {self.name} did not end within {_GONE_S:g} s; try again")
            time.sleep(_POLL_S)


def _head_node() -> str:
    for node in ray.nodes():
        if node["Alive"] and _HEAD in node["Resources"]:
            return str(node["NodeID"])
    raise CallerError("the head of the Ray cluster is not alive; see `ray status`")
