"""Every document against Kubernetes' and the operators' own schemas, from the folder that TONLE_K8S_SCHEMAS names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.matrix import CASES, KINDS, Case, workload_of
from tests.unit.deploy.schemas import FOLDER, validator
from tonle.deploy.document import Document
from tonle.deploy.render import render

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not FOLDER, reason="TONLE_K8S_SCHEMAS names no folder with schemas and validate.py")


@pytest.fixture(scope="module")
def errors() -> Callable[[Document], list[str]]:
    return validator()


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_is_valid(kind: str, errors: Callable[[Document], list[str]]) -> None:
    ours = [case for case in CASES if case.kind == kind]
    assert len(ours) > 8
    for case in ours:
        for document in case.documents:
            assert errors(document) == [], f"{case.id}: {document['kind']}"


def test_the_examples_are_valid(errors: Callable[[Document], list[str]]) -> None:
    files = [file for kind in KINDS for file in (ROOT / "deploy" / kind).glob("*.yaml")]
    files = [file for file in files if file.name != "kustomization.yaml"]  # a file for kustomize, not for a cluster
    assert len(files) > 5
    for file in files:
        for document in yaml.safe_load_all(file.read_text()):
            assert errors(document) == [], file


def _misspell(pod: Document) -> None:
    pod["containers"][0]["enviroment"] = []


def _wrong_unit(pod: Document) -> None:
    pod["containers"][0]["resources"] = {"limits": {"memory": "2GiB"}}


def _leave_out(pod: Document) -> None:
    del pod["containers"][0]["name"]


def _as_number(pod: Document) -> None:
    pod["containers"][0]["env"] = [{"name": "PORT", "value": 8000}]


@pytest.mark.parametrize("broken", [_misspell, _wrong_unit, _leave_out, _as_number])
@pytest.mark.parametrize("kind", ["kubernetes", "llm-d", "llmisvc"])
def test_a_mistake_in_a_pod_is_found(
    kind: str, broken: Callable[[Document], None], errors: Callable[[Document], list[str]]
) -> None:
    for document in Case("", kind, workload_of()).documents:
        spec = document.get("spec", {})
        pods = [at["spec"] for at in [spec.get("template", {})] if "spec" in at]
        pods += [spec["template"]] if "containers" in spec.get("template", {}) else []
        for pod in pods:
            assert errors(document) == []
            before = copy.deepcopy(pod)
            broken(pod)
            assert errors(document) != [], f"{document['kind']}: {broken.__name__}"
            pod.clear()
            pod.update(before)


@pytest.mark.parametrize(
    ("kind", "name", "path", "value"),
    [
        ("keda", "ScaledObject", ("spec", "maxReplicas"), 4),  # is maxReplicaCount
        ("keda", "ScaledObject", ("spec", "triggers"), None),
        ("keda", "ScaledObject", ("spec", "triggers", 0, "metadata", "threshold"), 5),  # must be text
        ("kserve", "InferenceService", ("spec", "predictor", "minReplica"), 1),
        ("kserve", "InferenceService", ("spec", "predictor"), None),
        ("kserve", "InferenceService", ("spec", "predictor", "model", "resources"), {"limits": {"memory": "16 GB"}}),
        ("kserve", "ServingRuntime", ("spec", "containers"), None),
        ("kserve", "ServingRuntime", ("spec", "supportedModelFormat"), []),
        ("llmisvc", "LLMInferenceService", ("spec", "scaling"), {"keda": {}}),  # of a later KServe
        ("llmisvc", "LLMInferenceService", ("spec", "model", "uri"), None),
        ("llm-d", "InferencePool", ("spec", "targetPortNumber"), 8000),  # of an older version
        ("llm-d", "InferencePool", ("spec", "targetPorts"), None),
        ("llm-d", "HTTPRoute", ("spec", "rules", 0, "timeouts", "request"), "1 minute"),
        ("llm-d", "Role", ("rule",), []),
    ],
)  # fmt: skip
def test_a_mistake_in_a_custom_resource_is_found(
    kind: str, name: str, path: tuple[Any, ...], value: Any, errors: Callable[[Document], list[str]]
) -> None:
    [document] = [each for each in Case("", kind, workload_of()).documents if each["kind"] == name]
    assert errors(document) == []
    at: Any = document
    for step in path[:-1]:
        at = at[step]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    assert errors(document) != []


def test_values_of_the_adapters_chart_are_one_document() -> None:
    [values] = [file for file in render("kubernetes", workload_of({}, {"autoscaler": "hpa"})) if file.body]
    found = yaml.safe_load(values.text)
    assert found["prometheus"] == {"url": "http://prometheus.monitoring", "port": 9090, "path": ""}
    assert [rule["name"]["as"] for rule in found["rules"]["custom"]] == [
        "llm_requests_per_second",
        "llm_requests_waiting",
    ]
