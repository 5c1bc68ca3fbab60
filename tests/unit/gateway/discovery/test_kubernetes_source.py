"""Discovery in Kubernetes, against a small API server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kubernetes_api import NAMESPACE, SERVICE, FakeKubernetes, endpoint, slice_of
from tests.gateway.running_gateway import run, until
from tests.unit.edge.certificates import Authority
from tonle.config.discovery import KubernetesDiscovery, kubernetes_access
from tonle.config.gateway import GatewayConfig
from tonle.config.routing import BackendConfig
from tonle.edge.listening import tls_context
from tonle.errors import ConfigError
from tonle.gateway.discovery import discovery, kubernetes_source
from tonle.gateway.discovery.discovery import Discovery
from tonle.gateway.discovery.endpoint_slices import EndpointSlice, Metadata, Port, found_in
from tonle.gateway.discovery.kubernetes_source import KubernetesSource
from tonle.gateway.discovery.source import SourceLost


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_source, "MIN_WATCH_S", 0.01)
    monkeypatch.setattr(discovery, "PAUSE_S", 0.01)
    monkeypatch.setattr(discovery, "MAX_PAUSE_S", 0.05)


class Seen:
    """What discovery wants, as it comes."""

    def __init__(self) -> None:
        self.sets: list[dict[str, BackendConfig]] = []

    def reconcile(self, source: str, rows: Sequence[BackendConfig]) -> None:
        self.sets.append({row.name or "": row for row in rows})

    @property
    def urls(self) -> dict[str, str]:
        return {name: row.url for name, row in self.sets[-1].items()} if self.sets else {}

    @property
    def roles(self) -> dict[str, str]:
        return {name: row.role for name, row in self.sets[-1].items()}


def wanted(cluster: FakeKubernetes, folder: Path, **fields: Any) -> KubernetesDiscovery:
    (folder / "token").write_text(cluster.token + "\n")
    return KubernetesDiscovery(**{
        "service": SERVICE, "namespace": NAMESPACE, "api_server": cluster.url, "token_file": str(folder / "token"), **fields,
    })  # fmt: skip


@contextlib.asynccontextmanager
async def following(cluster: FakeKubernetes, folder: Path, **fields: Any) -> AsyncIterator[tuple[Seen, Discovery]]:
    if not cluster.url:
        await cluster.start()
    seen = Seen()
    found = Discovery([KubernetesSource(wanted(cluster, folder, **fields))], seen.reconcile)
    await found.start()
    try:
        yield seen, found
    finally:
        await found.stop()
        await cluster.stop()


def check(work: Callable[[FakeKubernetes], Any]) -> None:
    async def main() -> None:
        await work(FakeKubernetes())

    run(main())


def test_pods_come_are_unready_terminate_and_go(tmp_path: Path) -> None:
    async def work(cluster: FakeKubernetes) -> None:
        cluster.put("llm-a", slice_of(endpoint("10.0.0.1", "pod-1")))
        async with following(cluster, tmp_path) as (seen, _):
            assert seen.urls == {"pod-1": "http://10.0.0.1:8000"}
            cluster.put("llm-b", slice_of(endpoint("10.0.0.2", "pod-2"), endpoint("10.0.0.3", "pod-3", ready=False)))
            await until(lambda: "pod-2" in seen.urls, "pod-2 is not seen")
            assert "pod-3" not in seen.urls
            cluster.put(
                "llm-b", slice_of(endpoint("10.0.0.2", "pod-2", terminating=True), endpoint("10.0.0.3", "pod-3"))
            )
            await until(lambda: set(seen.urls) == {"pod-1", "pod-3"}, "the set is not followed")
            cluster.delete("llm-a")
            await until(lambda: set(seen.urls) == {"pod-3"}, "a slice that was deleted is still there")
            assert cluster.calls.count("list") == 1

    check(work)


def test_a_watch_that_ends_goes_on_where_a_bookmark_left_it(tmp_path: Path) -> None:
    async def work(cluster: FakeKubernetes) -> None:
        cluster.put("a", slice_of(endpoint("10.0.0.1", "pod-1")))
        async with following(cluster, tmp_path) as (seen, _):
            cluster.bookmark()
            last = f"watch {cluster.version}"
            await asyncio.sleep(0.02)
            cluster.end_watches()
            await until(lambda: last in cluster.calls, "it did not go on from the bookmark")
            cluster.put("a", slice_of(endpoint("10.0.0.9", "pod-9")))
            await until(lambda: "pod-9" in seen.urls, "the second watch sees nothing")
            assert cluster.calls.count("list") == 1

    check(work)


@pytest.mark.parametrize("how", ["status", "event"])
def test_a_lost_place_in_the_history_means_a_new_list(tmp_path: Path, how: str) -> None:
    async def work(cluster: FakeKubernetes) -> None:
        cluster.put("a", slice_of(endpoint("10.0.0.1", "pod-1")))
        async with following(cluster, tmp_path) as (seen, found):
            cluster.slices["a"] = slice_of(endpoint("10.0.0.2", "pod-2"))  # the event is never sent
            if how == "status":
                cluster.compact()
                cluster.end_watches()
            else:
                cluster.error_event(410)
            await until(lambda: "pod-2" in seen.urls, "it was not listed again")
            assert cluster.calls.count("list") >= 2 and not found.problems

    check(work)


def test_nothing_is_removed_while_the_api_server_is_away(tmp_path: Path) -> None:
    async def work(cluster: FakeKubernetes) -> None:
        cluster.put("a", slice_of(endpoint("10.0.0.1", "pod-1")))
        async with following(cluster, tmp_path) as (seen, found):
            cluster.fail_with = 500
            cluster.end_watches()
            await until(lambda: found.problems, "the failure is not seen")
            assert "it answers 500 (on purpose)" in next(iter(found.problems.values()))
            assert set(seen.urls) == {"pod-1"}
            cluster.slices["a"] = slice_of(endpoint("10.0.0.2", "pod-2"))
            cluster.fail_with = 0
            await until(lambda: set(seen.urls) == {"pod-2"}, "it is not read again")
            assert not found.problems

    check(work)


def test_a_token_that_is_refused_is_named_and_one_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    async def work(cluster: FakeKubernetes) -> None:
        cluster.put("a", slice_of(endpoint("10.0.0.1", "pod-1")))
        async with following(cluster, tmp_path) as (seen, found):
            cluster.token = "token-2"
            cluster.end_watches()
            await until(lambda: found.problems, "the refusal is not seen")
            assert "does not accept the token in" in next(iter(found.problems.values()))
            (tmp_path / "token").write_text("token-2")
            await until(lambda: not found.problems, "the new token is not read")
            assert set(seen.urls) == {"pod-1"}

    check(work)


def test_a_service_account_that_may_not_is_told_which_role_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "FIRST_S", 0.2)

    async def work(cluster: FakeKubernetes) -> None:
        cluster.fail_with = 403
        async with following(cluster, tmp_path) as (seen, found):
            assert "list and watch endpointslices" in next(iter(found.problems.values())) and not seen.sets

    check(work)


def test_roles_come_from_labels_of_pods_where_these_can_be_read(tmp_path: Path) -> None:
    async def work(cluster: FakeKubernetes) -> None:
        for name, label in (("p", "prefill"), ("d", "decode"), ("b", "both")):
            cluster.pods[name] = {"llm-d.ai/role": label}
        cluster.put(
            "a", slice_of(*(endpoint(f"10.0.0.{n}", name) for n, name in enumerate(("p", "d", "b", "missing"))))
        )
        async with following(cluster, tmp_path, backend={"max_concurrent": 7}) as (seen, _):
            assert seen.roles == {"p": "prefill", "d": "decode", "b": "any", "missing": "any"}
            assert {row.max_concurrent for row in seen.sets[-1].values()} == {7}
            cluster.put("b", slice_of(endpoint("10.0.0.8", "d2")))
            await until(lambda: "d2" in seen.urls, "the new one is not seen")
            assert cluster.calls.count("pod p") == 1  # read once

    check(work)


def test_pods_that_may_not_be_read_have_any_role(tmp_path: Path) -> None:
    async def work(cluster: FakeKubernetes) -> None:
        cluster.pods["p"] = {"llm-d.ai/role": "prefill"}
        cluster.pods_forbidden = True
        cluster.put("a", slice_of(endpoint("10.0.0.1", "p")))
        async with following(cluster, tmp_path) as (seen, _):
            assert seen.roles == {"p": "any"}
            cluster.put("b", slice_of(endpoint("10.0.0.2", "p2")))
            await until(lambda: "p2" in seen.urls, "not seen")
            assert len([call for call in cluster.calls if call.startswith("pod")]) == 1  # not asked again

    check(work)


def test_the_api_server_is_reached_over_tls_and_only_if_its_authority_is_the_one_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "FIRST_S", 0.5)
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair = authority.issue("server")
    tls = tls_context(GatewayConfig(ssl_certfile=str(pair.cert), ssl_keyfile=str(pair.key)))

    async def work(cluster: FakeKubernetes) -> None:
        cluster.put("a", slice_of(endpoint("10.0.0.1", "pod-1")))
        await cluster.start(tls)
        async with following(cluster, tmp_path, ca_file=str(authority.cert)) as (seen, found):
            assert set(seen.urls) == {"pod-1"}
            stranger = Discovery([KubernetesSource(wanted(cluster, tmp_path, ca_file=str(other.cert)))], seen.reconcile)
            await stranger.start()
            assert "TLS error" in next(iter(stranger.problems.values()))
            await stranger.stop()
            assert not found.problems

    check(work)


# -- without a server


def read(content: dict[str, Any], name: str = "a") -> EndpointSlice:
    import msgspec

    return msgspec.convert({"metadata": {"name": name}, **content}, EndpointSlice)


def test_one_pod_in_slices_of_two_families_is_one_backend() -> None:
    slices = [
        read(slice_of(endpoint("fd00::1", "pod-1"), family="IPv6"), "six"),
        read(slice_of(endpoint("10.0.0.1", "pod-1")), "four"),
        read(slice_of(endpoint("fd00::2", "pod-2"), family="IPv6"), "more"),
        read(slice_of(endpoint("example.com"), family="FQDN"), "name"),
    ]
    found = {each.name: each.url for each in found_in(slices, KubernetesDiscovery(service="s"))}
    assert found == {"pod-1": "http://10.0.0.1:8000", "pod-2": "http://[fd00::2]:8000"}


def test_conditions_that_are_not_told_count_as_ready_and_no_pod_means_an_address() -> None:
    slices = [
        read({"endpoints": [{"addresses": ["10.0.0.1"]}], "ports": [{"port": 80}]}),
        read({"endpoints": None}, "b"),
    ]
    assert [each.name for each in found_in(slices, KubernetesDiscovery(service="s"))] == ["10.0.0.1:80"]


@pytest.mark.parametrize(
    ("port", "url"), [("api", "http://10.0.0.1:8000"), ("metrics", "http://10.0.0.1:9090"), (7, "http://10.0.0.1:7")]
)
def test_the_port_by_name_or_number(port: Any, url: str) -> None:
    slices = [read(slice_of(endpoint("10.0.0.1", "p"), ports=(("api", 8000), ("metrics", 9090))))]
    assert [each.url for each in found_in(slices, KubernetesDiscovery(service="s", port=port))] == [url]


@pytest.mark.parametrize(("port", "said"), [(None, "set port to the one"), ("http", "no one port 'http'")])
def test_a_port_that_is_not_clear_is_asked_for(port: Any, said: str) -> None:
    each = EndpointSlice(Metadata("a"), "IPv4", [], [Port("api", 1), Port("metrics", 2)])
    slices = [read(slice_of(endpoint("10.0.0.1", "p"), ports=(("api", 8000), ("metrics", 9090)))), each]
    with pytest.raises(SourceLost, match=rf"{said}.* its ports are: api \(8000\), metrics \(9090\)"):
        found_in(slices, KubernetesDiscovery(service="s", port=port))


def test_the_api_server_of_the_cluster_is_in_the_pods_environment() -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = kubernetes_access(KubernetesDiscovery(service="s", namespace="n"), environ)
    assert access.url == "https://[fd00::1]:6443" and access.namespace == "n"
    assert str(access.token_file) == "/var/run/secrets/kubernetes.io/serviceaccount/token"
    with pytest.raises(ConfigError, match="not a pod of Kubernetes"):
        kubernetes_access(KubernetesDiscovery(service="s", namespace="n"), {})
