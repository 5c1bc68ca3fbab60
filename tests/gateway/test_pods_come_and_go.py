"""A gateway that finds its backends in Kubernetes, through a rolling update: nothing that has not begun is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

from tests.fakes.kubernetes_api import NAMESPACE, SERVICE, FakeKubernetes, endpoint, slice_of
from tests.gateway.running_gateway import RunningGateway, Upstream, run, running_gateway, until
from tonle.config.discovery import DiscoveryConfig, KubernetesDiscovery


def put(cluster: FakeKubernetes, pod: str, server: Upstream, **conditions: bool) -> None:
    """One slice for each pod: all servers have the address of this machine, and ports of their own."""
    port = urlsplit(server.url).port or 0
    cluster.put(f"slice-{pod}", slice_of(endpoint("127.0.0.1", pod, **conditions), ports=(("http", port),)))


async def is_up(place: RunningGateway, pod: str) -> None:
    await until(lambda: (found := place.gateway.pool.find(pod)) and found.is_up, f"{pod} is not there")


def test_a_rolling_update_under_load(tmp_path: Path) -> None:
    async def main() -> None:
        cluster, old, new = FakeKubernetes(), Upstream("m"), Upstream("m")
        for server in (old, new):
            await server.start()
        await cluster.start()
        put(cluster, "pod-old", old)
        (tmp_path / "token").write_text(cluster.token)
        source = DiscoveryConfig(
            kubernetes=KubernetesDiscovery(
                service=SERVICE, namespace=NAMESPACE, port="http", api_server=cluster.url,
                token_file=str(tmp_path / "token"), backend={"max_concurrent": 2},
            )
        )  # fmt: skip
        async with running_gateway(tmp_path, discovery=(source,), cache=None) as place:
            assert (await place.ask()).headers["x-tonle-backend"] == "pod-old"
            old.pause_after = 1
            begun = asyncio.create_task(place.ask(stream=True))  # its first word is on its way
            await until(lambda: len(old.requests) == 2, "the stream is not there")
            old.hang.clear()
            asked = [asyncio.create_task(place.ask(f"{number}")) for number in range(4)]
            await until(lambda: place.gateway.pool.named("pod-old").gate.num_queued == 3, "they do not wait")
            put(cluster, "pod-new", new)
            await is_up(place, "pod-new")
            put(cluster, "pod-old", old, ready=False, terminating=True)
            await until(lambda: place.gateway.pool.named("pod-old").leaving, "it does not leave")
            await until(lambda: len(new.requests) == 3, "those that waited are not sent to the new one")
            await old.kill()  # its grace period is over: one request had been sent and not begun, one stream had begun
            replies = await asyncio.gather(*asked)
            assert [reply.headers["x-tonle-backend"] for reply in replies] == ["pod-new"] * 4
            assert "broke off" in (await begun).text
            cluster.delete("slice-pod-old")
            await until(lambda: place.gateway.pool.find("pod-old") is None, "it is still there")
            assert (await place.ask("at last")).headers["x-tonle-backend"] == "pod-new"
        statuses = [record["status"] for record in place.records()]
        assert sorted(statuses) == ["failed", "ok", "ok", "ok", "ok", "ok", "ok"]
        await new.stop()
        await cluster.stop()

    run(main())


def test_the_next_pod_of_a_stateful_set_has_the_same_name(tmp_path: Path) -> None:
    async def main() -> None:
        cluster, first, second = FakeKubernetes(), Upstream("m"), Upstream("m")
        for server in (first, second):
            await server.start()
        await cluster.start()
        put(cluster, "llm-0", first)
        (tmp_path / "token").write_text(cluster.token)
        wanted = KubernetesDiscovery(
            service=SERVICE, namespace=NAMESPACE, api_server=cluster.url, token_file=str(tmp_path / "token")
        )
        async with running_gateway(tmp_path, discovery=(DiscoveryConfig(kubernetes=wanted),), cache=None) as place:
            first.hang.clear()
            running = asyncio.create_task(place.ask("with the first"))
            await until(lambda: len(first.requests) == 1, "it was not sent")
            put(cluster, "llm-0", second)  # the old one still runs
            await until(lambda: place.gateway.pool.named("llm-0").row.url == second.url, "it is not replaced")
            await is_up(place, "llm-0")
            assert (await place.ask("with the second")).status_code == 200 and len(second.requests) == 1
            shown = (await place.get("/admin/backends")).json()["backends"]
            assert [(each["name"], each["leaving"]) for each in shown] == [("llm-0", False)]
            assert (await place.get("/metrics")).text.count('tonle:backend_up{backend="llm-0"}') == 1
            first.hang.set()
            assert (await running).status_code == 200
        for server in (first, second):
            await server.stop()
        await cluster.stop()

    run(main())
