"""`tonle ray` on a cluster of a head and two raylets, with real replicas of a tiny model, behind a real gateway, under load.

The tests run in this order on one cluster, which the last of them breaks.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.client import KEY
from tests.chaos.load import Load
from tests.fakes.server import Server, tonle_gateway

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

NAME = "tiny"


class Service:
    """The service as an operator sees it: by the command line."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster = cluster
        self._file = folder / "tonle.yaml"
        self._settings = {
            "model": str(folder / "model"), "served_model_name": "m", "kv_cache_memory": "64MiB", "max_num_seqs": 4,
            "trust_salt": True,
        }  # fmt: skip
        self._ray = {
            "name": NAME, "address": cluster.address, "list_port": 0, "scale_up_delay": "3s", "scale_down_delay": "8s",
            "max_replicas": 3,
        }  # fmt: skip

    def up(self, ray: dict[str, Any] | None = None, *, code: int = 0, wait_s: int = 180, **settings: Any) -> str:
        """Returns the URL of its list. What is given stays for the next call."""
        self._settings |= settings
        self._ray |= ray or {}
        self._file.write_text(json.dumps(self._settings | {"ray": self._ray}))
        done = _tonle("up", "--config", str(self._file), "--wait-timeout", str(wait_s))
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout.split("--discovery ")[1].split()[0]

    def status(self) -> dict[str, Any]:
        done = _tonle("status", "--name", NAME, "--address", self.cluster.address, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def ready(self) -> list[dict[str, Any]]:
        return [each for each in self.status()["replicas"] if each["state"] == "ready"]

    def settle(self, count: int, within_s: float = 180.0) -> None:
        """Until there are so many replicas, and all are ready."""

        def is_settled() -> bool:
            replicas = self.status()["replicas"]
            return len(replicas) == count and all(each["state"] == "ready" for each in replicas)

        until(is_settled, within_s, self.status)

    def nodes(self) -> dict[str, str]:
        """By replica, the node it is on."""
        import ray

        ray.init(address=self.cluster.address, namespace="tonle", ignore_reinit_error=True, log_to_driver=False)
        try:
            found = {}
            for group in ray.util.placement_group_table().values():
                if group["state"] == "CREATED":
                    found[group["name"].rpartition("/")[2]] = group["bundles_to_node_id"][0]
            return found
        finally:
            ray.shutdown()


def _tonle(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tonle", "ray", *arguments]
    return subprocess.run(command, text=True, capture_output=True, timeout=300)


def until(condition: Callable[[], object], within_s: float, describe: Callable[[], object]) -> None:
    ends_s = time.monotonic() + within_s
    while time.monotonic() < ends_s:
        if condition():
            return
        time.sleep(0.5)
    raise AssertionError(f"not within {within_s:g} s: {describe()}")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    from ray.cluster_utils import Cluster

    from tests.fakes.checkpoints import save_folder

    folder = tmp_path_factory.mktemp("ray")
    save_folder("llama", folder / "model")
    small = {"object_store_memory": 80 * 1024**2}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, **small)
        yield Service(cluster, folder)
        _tonle("down", "--name", NAME, "--address", cluster.address, "--now")
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def gateway(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    url = service.up()
    service._ray["list_port"] = int(url.rpartition(":")[2].partition("/")[0])  # where the gateway looks from now on
    state = tmp_path_factory.mktemp("gateway") / "state.db"
    flags = ("--discovery", url, "--api-key", KEY, "--state-db", str(state), "--history-db", "memory")
    with tonle_gateway(*flags) as server:
        yield server


@contextlib.contextmanager
def load(gateway: Server, name: str, num_callers: int, max_tokens: int = 48) -> Iterator[Load]:
    """Afterwards every request has been answered, or refused with a reason."""
    callers = Load(int(gateway.url.rpartition(":")[2]), name, num_callers=num_callers, max_tokens=max_tokens)
    callers.start()
    try:
        assert callers.wait_answered(1, 120), callers.outcomes[-3:]
        yield callers
    finally:
        outcomes = callers.stop()
        print(name, dict(collections.Counter(f"{each.kind} {each.detail}"[:100] for each in outcomes)))
    strange = [each for each in outcomes if each.kind not in ("answered", "refused")]
    assert strange == []
    assert callers.num_answered > 0


def test_replicas_follow_the_load_over_both_raylets(service: Service, gateway: Server) -> None:
    with load(gateway, "scale", 16):
        service.settle(3)
        assert len(set(service.nodes().values())) == 2
    service.settle(1)
    with load(gateway, "after", 2) as callers:
        assert callers.wait_answered(10, 60)
    assert {each.kind for each in callers.outcomes} == {"answered"}


def test_new_settings_replace_replicas_and_no_request_fails(service: Service, gateway: Server) -> None:
    service.up({"min_replicas": 2, "max_replicas": 2})
    before = {each["id"] for each in service.ready()}
    assert len(before) == 2
    with load(gateway, "update", 4) as callers:
        service.up(max_num_seqs=5)
        after = {each["id"] for each in service.ready()}
    assert len(after) == 2 and not before & after
    assert {each.kind for each in callers.outcomes} == {"answered"}


def test_settings_that_do_not_start_leave_the_old_replicas(service: Service, gateway: Server) -> None:
    before = {each["id"] for each in service.ready()}
    good = service._settings["model"]
    with load(gateway, "broken", 4) as callers:
        service.up(code=1, wait_s=25, model="/nowhere/model")
        status = service.status()
    assert "did not start" in status["problem"]
    assert {each["id"] for each in status["replicas"] if each["state"] == "ready"} == before
    assert {each.kind for each in callers.outcomes} == {"answered"}
    service.up(model=good)


def test_a_controller_that_dies_comes_back_and_keeps_its_replicas(service: Service, gateway: Server) -> None:
    before = {each["id"] for each in service.ready()}
    with load(gateway, "controller", 4) as callers:
        (pid,) = [
            each.pid
            for each in psutil.process_iter(["cmdline"])
            if "RayController" in " ".join(each.info["cmdline"] or ())
        ]
        os.kill(pid, signal.SIGKILL)
        until(lambda: {each["id"] for each in service.ready()} == before, 60, service.status)
    assert {each.kind for each in callers.outcomes} == {"answered"}


def test_replicas_of_a_node_that_dies_are_replaced(service: Service, gateway: Server) -> None:
    service.up({"min_replicas": 3, "max_replicas": 3})  # one node has two of them, or one
    nodes = service.nodes()
    lost = next(node for node in service.cluster.list_all_nodes() if node.node_id in nodes.values() and not node.head)
    victims = {id for id, node in nodes.items() if node == lost.node_id}
    ports = {int(each["url"].rpartition(":")[2]) for each in service.ready() if each["id"] in victims}
    with load(gateway, "node", 8):
        service.cluster.add_node(num_cpus=2, object_store_memory=80 * 1024**2)  # where they can go
        for process in psutil.process_iter(["cmdline"]):  # a node that loses power asks nobody
            if any(f"--port {port}" in " ".join(process.info["cmdline"] or ()) for port in ports):
                os.killpg(process.pid, signal.SIGKILL)
        service.cluster.remove_node(lost, allow_graceful=False)

        def is_replaced() -> bool:
            ids = {each["id"] for each in service.ready()}
            return len(ids) == 3 and not ids & victims

        until(is_replaced, 180, service.status)
