"""What no schema says and an API server, a webhook or a scheduler rejects, in every document of every kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.deploy.matrix import CASES, Case, workload_of
from tonle.deploy.document import Document
from tonle.deploy.render import render

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
LABEL_KEY = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MERGED = "LLMInferenceService"  # KServe merges its own settings under these pods
DRAINED = re.compile(r"--(?:shutdown-timeout|drain)=(\d+)")
ALL = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def pods(document: Document) -> Iterator[tuple[Document, Document]]:
    """Pods of a document, each with the labels of its template (none where an operator adds them)."""
    spec = document.get("spec", {})
    if document["kind"] == "Deployment":
        yield spec["template"]["spec"], spec["template"]["metadata"]["labels"]
    elif document["kind"] == MERGED:
        yield spec["template"], {}
        if "prefill" in spec:
            yield spec["prefill"]["template"], {}
    elif document["kind"] == "ServingRuntime":
        yield spec, {}


def containers(document: Document) -> Iterator[Document]:
    for pod, _ in pods(document):
        yield from [*pod["containers"], *pod.get("initContainers", [])]


def of_kind(case: Case, *kinds: str) -> list[Document]:
    return [document for document in case.documents if document["kind"] in kinds]


def amount(text: str) -> float:
    """Of a quantity."""
    number, unit = re.fullmatch(r"([0-9.]+)(m|Mi|Gi)?", text).groups()  # type: ignore[union-attr]
    return float(number) * {None: 1, "m": 0.001, "Mi": 2**20, "Gi": 2**30}[unit]


def walk(value: Any) -> Iterator[Document]:
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from walk(each)
    elif isinstance(value, list):
        for each in value:
            yield from walk(each)


@ALL
def test_names_and_labels(case: Case) -> None:
    seen = set()
    for document in case.documents:
        meta = document["metadata"]
        assert DNS_LABEL.fullmatch(meta["name"]) and len(meta["name"]) <= 52, "a name of a pod is cut at 58"
        key = (document["kind"], meta["name"])
        assert key not in seen, f"{key} is there twice"
        seen.add(key)
        for found in walk(document):
            for holder in ("labels", "matchLabels"):
                for name, value in (found.get(holder) or {}).items():
                    assert LABEL_KEY.fullmatch(name) and LABEL_VALUE.fullmatch(value), (name, value)
            for name, value in (found.get("annotations") or {}).items():
                assert isinstance(value, str), name


@ALL
def test_a_namespace_is_everywhere_or_nowhere(case: Case) -> None:
    wanted = case.workload.deploy.namespace or ("default" if case.kind == "llm-d" else None)
    for document in case.documents:
        assert document["metadata"].get("namespace") == wanted
        for subject in document.get("subjects", ()):
            assert subject["namespace"] == wanted is not None


@ALL
def test_selectors_find_their_pods(case: Case) -> None:
    templates = [labels for document in case.documents for _, labels in pods(document) if labels]
    for document in of_kind(case, "Deployment"):
        selector = document["spec"]["selector"]["matchLabels"]
        assert selector and selector.items() <= document["spec"]["template"]["metadata"]["labels"].items()
    if case.kind not in ("kubernetes", "llm-d"):
        return
    for document in of_kind(case, "Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "InferencePool"):
        spec = document["spec"]
        selector = spec.get("podSelector", spec.get("selector"))
        selector = selector.get("matchLabels", selector)
        assert selector and any(selector.items() <= labels.items() for labels in templates), document["kind"]
    for pod, labels in (each for document in case.documents for each in pods(document)):
        for constraint in pod.get("topologySpreadConstraints", ()):
            assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()


def test_two_deployments_never_select_each_others_pods() -> None:
    for case in CASES:
        deployments = of_kind(case, "Deployment")
        for one in deployments:
            for other in deployments:
                if one is not other:
                    labels = other["spec"]["template"]["metadata"]["labels"]
                    assert not one["spec"]["selector"]["matchLabels"].items() <= labels.items(), case.id


@ALL
def test_containers(case: Case) -> None:
    for document in case.documents:
        for pod, _ in pods(document):
            volumes = [volume["name"] for volume in pod.get("volumes", ())]
            assert len(volumes) == len(set(volumes))
            every = [*pod["containers"], *pod.get("initContainers", ())]
            ports = [port for container in every for port in container.get("ports", ())]
            assert len({port["containerPort"] for port in ports}) == len({port["name"] for port in ports}) == len(ports)
            assert all(len(port["name"]) <= 15 for port in ports)
            for container in every:
                paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
                assert len(paths) == len(set(paths))
                assert {mount["name"] for mount in container.get("volumeMounts", ())} <= set(volumes)
                names = [variable["name"] for variable in container.get("env", ())]
                assert len(names) == len(set(names)) and all(VARIABLE.fullmatch(name) for name in names)
                for variable in container.get("env", ()):
                    assert ("value" in variable) != ("valueFrom" in variable)
                own = {port["containerPort"] for port in container.get("ports", ())}
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    handler = container.get(probe, {}).get("httpGet") or container.get(probe, {}).get("grpc")
                    assert handler is None or handler["port"] in own
                    assert handler is not None or document["kind"] == MERGED or probe not in container


@ALL
def test_resources(case: Case) -> None:
    found = [each["resources"] for document in case.documents for each in containers(document) if "resources" in each]
    found += [document["spec"]["predictor"]["model"]["resources"] for document in of_kind(case, "InferenceService")]
    for resources in found:
        requests, limits = resources["requests"], resources["limits"]
        assert "memory" in limits and "cpu" in requests
        for name, limit in limits.items():
            assert amount(requests[name]) <= amount(limit), name
        assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu")
    servers = [each for each in found if "nvidia.com/gpu" in each["limits"]]
    assert bool(servers) == (case.workload.resources.gpus > 0 and case.kind != "keda")


@ALL
def test_a_pod_has_time_to_finish(case: Case) -> None:
    for document in case.documents:
        for pod, _ in pods(document):
            pod_settings = pod
            if document["kind"] == "ServingRuntime":  # its service has them
                [service] = of_kind(case, "InferenceService")
                pod_settings = service["spec"]["predictor"]
            for container in pod["containers"]:
                flags = " ".join([*container.get("command", ()), *container.get("args", ())])
                if "serve" not in container.get("command", ()) and document["kind"] != MERGED:
                    continue
                drain_s = int(DRAINED.search(flags)[1]) if DRAINED.search(flags) else 30  # type: ignore[index]
                sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"] if document["kind"] != MERGED else 15
                assert pod_settings["terminationGracePeriodSeconds"] > sleep_s + drain_s


def test_a_hook_is_never_merged_with_kserves_own() -> None:
    for case in CASES:
        for document in of_kind(case, MERGED):
            assert all("lifecycle" not in container for container in containers(document))


@ALL
def test_no_secret_is_written_and_no_path_of_this_machine(case: Case) -> None:
    for document in case.documents:
        for container in containers(document):
            for variable in container.get("env", ()):
                if any(word in variable["name"] for word in ("KEY", "TOKEN", "PASSWORD")):
                    assert "secretKeyRef" in variable["valueFrom"]
        assert "./models" not in str(document) and "/root" not in str(document) and "/home" not in str(document)


def test_secrets_arrive_where_each_engine_looks_for_them() -> None:
    secrets = {"api_key_secret": "keys", "hub_token_secret": "hub", "pod_monitor": True}
    for engine, variable in (("tonle", "TONLE_API_KEY"), ("vllm", "VLLM_API_KEY")):
        case = Case(
            "",
            "kubernetes",
            workload_of({"model": "org/some-1B", "max_model_len": 4096}, {"engine": engine, **secrets}),
        )
        [container] = containers(of_kind(case, "Deployment")[0])
        found = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each}
        assert found == {variable: {"name": "keys", "key": "api-key"}, "HF_TOKEN": {"name": "hub", "key": "HF_TOKEN"}}
    [account] = of_kind(Case("", "kserve", case.workload), "ServiceAccount")  # with which KServe fetches the model
    assert account["secrets"] == [{"name": "hub"}]


@ALL
def test_what_is_referred_to_is_there(case: Case) -> None:
    names = {(document["kind"], document["metadata"]["name"]) for document in case.documents}
    for document in case.documents:
        spec = document.get("spec", {})
        for pod, _ in pods(document):
            if "serviceAccountName" in pod:
                assert ("ServiceAccount", pod["serviceAccountName"]) in names
            for volume in pod.get("volumes", ()):
                assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in names
        if document["kind"] == "InferenceService":
            assert ("ServingRuntime", spec["predictor"]["model"]["runtime"]) in names
            account = spec["predictor"].get("serviceAccountName")
            assert account is None or ("ServiceAccount", account) in names
        if document["kind"] == "InferencePool":
            assert ("Service", spec["endpointPickerRef"]["name"]) in names
        if document["kind"] == "HTTPRoute":
            assert ("InferencePool", spec["rules"][0]["backendRefs"][0]["name"]) in names
        if document["kind"] == "RoleBinding":
            assert ("Role", document["roleRef"]["name"]) in names
            account = document["subjects"][0]["name"]  # a gateway's is made with the gateway
            assert ("ServiceAccount", account) in names or account == case.workload.deploy.discovered_by
        if document["kind"] in ("ScaledObject", "HorizontalPodAutoscaler") and case.kind == "llm-d":
            assert ("Deployment", spec["scaleTargetRef"]["name"]) in names


@ALL
def test_an_autoscaler_alone_decides_how_many(case: Case) -> None:
    deploy = case.workload.deploy
    for document in of_kind(case, "Deployment"):
        if not document["metadata"]["name"].endswith("-epp"):
            replicas = document["spec"].get("replicas")
            assert replicas is None if deploy.autoscaler != "none" else replicas >= 1
    for document in of_kind(case, MERGED):
        assert ("replicas" in document["spec"]) == (deploy.autoscaler == "none")
    targets = [
        each["spec"]["scaleTargetRef"]["name"] for each in of_kind(case, "ScaledObject", "HorizontalPodAutoscaler")
    ]
    assert len(targets) == len(set(targets))
    for document in of_kind(case, "ScaledObject"):
        assert 1 <= document["spec"]["minReplicaCount"] <= document["spec"]["maxReplicaCount"]


# -- rules of KServe's webhooks


@pytest.mark.parametrize("case", [case for case in CASES if case.kind == "kserve"], ids=lambda case: case.id)
def test_kserves_webhook(case: Case) -> None:
    [service] = of_kind(case, "InferenceService")
    [runtime] = of_kind(case, "ServingRuntime")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", service["metadata"]["name"])
    noted = service["metadata"]["annotations"]
    assert noted["serving.kserve.io/deploymentMode"] == "Standard"
    assert noted["serving.kserve.io/autoscalerClass"] in ("keda", "none")
    predictor = service["spec"]["predictor"]
    assert "scaleMetric" not in predictor and "scaleTarget" not in predictor
    for metric in predictor.get("autoScaling", {}).get("metrics", ()):
        assert metric["type"] == "External"
        assert metric["external"]["metric"]["query"] and metric["external"]["target"]["value"]
    [container] = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"
    assert "PYTHONPATH" not in [variable["name"] for variable in container["env"]]
    formats = [(each["name"], each["version"]) for each in runtime["spec"]["supportedModelFormats"]]
    assert formats == [(predictor["model"]["modelFormat"]["name"], predictor["model"]["modelFormat"]["version"])]
    assert ("/mnt/models" in container["args"]) == ("storageUri" in predictor["model"])
    names = " ".join(container["args"]).split("--served-model-name")[1]
    assert names.startswith(("={{.Name}}", " {{.Name}}"))
    assert "--port=8080" in container["args"] and container["ports"][0]["containerPort"] == 8080


@pytest.mark.parametrize("case", [case for case in CASES if case.kind == "llmisvc"], ids=lambda case: case.id)
def test_kserves_webhook_for_llms(case: Case) -> None:
    [service] = of_kind(case, MERGED)
    spec = service["spec"]
    assert "scaling" not in spec and "worker" not in spec
    for part in [spec, spec["prefill"]] if "prefill" in spec else [spec]:
        assert [container["name"] for container in part["template"]["containers"]] == ["main"]
        assert part.get("parallelism", {}).get("tensor") == (
            case.workload.resources.gpus if case.workload.resources.gpus > 1 else None
        )
    config = spec["router"]["scheduler"]["config"]["inline"]
    assert isinstance(config, dict)


def _known_plugins(config: Document) -> None:
    declared = [plugin.get("name", plugin["type"]) for plugin in config["plugins"]]
    assert len(declared) == len(set(declared))
    for profile in config["schedulingProfiles"]:
        assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= set(declared)
        assert profile["plugins"][-1]["pluginRef"] == "max-score-picker"
        assert "prefix-cache-scorer" in {plugin["pluginRef"] for plugin in profile["plugins"]}
    for plugin in config["plugins"]:
        for decider in plugin.get("parameters", {}).get("deciders", {}).values():
            assert decider in declared


def test_the_endpoint_picker_knows_its_plugins() -> None:
    import yaml

    seen = 0
    for case in CASES:
        for document in of_kind(case, "ConfigMap"):
            [text] = document["data"].values()
            _known_plugins(yaml.safe_load(text))
            seen += 1
        for document in of_kind(case, MERGED):
            _known_plugins(document["spec"]["router"]["scheduler"]["config"]["inline"])
            seen += 1
    assert seen > 20


# -- the rules above can fail


def _select_nothing(documents: list[Document]) -> None:
    documents[0]["spec"]["selector"]["matchLabels"] = {"app": "other"}


def _lose_a_volume(documents: list[Document]) -> None:
    del documents[0]["spec"]["template"]["spec"]["volumes"][0]


def _ask_for_more(documents: list[Document]) -> None:
    documents[0]["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"] = "999Gi"


def _probe_elsewhere(documents: list[Document]) -> None:
    documents[0]["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["port"] = 1


def _hurry(documents: list[Document]) -> None:
    documents[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 30


def _say_it_twice(documents: list[Document]) -> None:
    variables = documents[0]["spec"]["template"]["spec"]["containers"][0]["env"]
    variables.append(variables[0])


def _shout(documents: list[Document]) -> None:
    documents[0]["metadata"]["name"] = "Qwen/Qwen3"


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (_select_nothing, test_selectors_find_their_pods), (_lose_a_volume, test_containers),
        (_ask_for_more, test_resources), (_probe_elsewhere, test_containers), (_hurry, test_a_pod_has_time_to_finish),
        (_say_it_twice, test_containers), (_shout, test_names_and_labels),
    ],
)  # fmt: skip
def test_a_mistake_is_found(broken: Callable[[list[Document]], None], rule: Callable[[Case], None]) -> None:
    class Broken(Case):
        @property
        def documents(self) -> list[Document]:
            documents = super().documents
            broken(documents)
            return documents

    rule(Case("", "kubernetes", workload_of()))
    with pytest.raises(AssertionError):
        rule(Broken("", "kubernetes", workload_of()))


def test_a_gateway_elsewhere_may_watch_the_pods_and_no_more() -> None:
    workload = workload_of({}, {"namespace": "models", "discovered_by": "gateways/tonle"})
    documents = [document for file in render("kubernetes", workload) for document in file.documents]
    role, binding = (next(each for each in documents if each["kind"] == kind) for kind in ("Role", "RoleBinding"))
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "models"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "tonle", "namespace": "gateways"}]
    verbs = {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
    assert verbs == {"endpointslices": {"get", "list", "watch"}, "pods": {"get"}}
