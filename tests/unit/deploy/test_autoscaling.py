"""What autoscalers ask Prometheus: metrics that servers export, of the right pods, per replica."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.deploy.matrix import CASES, LONGEST, Case, workload_of
from tonle.deploy.autoscaling import triggers
from tonle.deploy.document import Document
from tonle.deploy.endpoint_picker import ENGINE_LABEL
from tonle.engine.messages import LoopStats
from tonle.telemetry.metrics import Metrics

# As llm-d's picker reads them from pods with the label engine-type: vllm.
PICKED = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
)


class Engine:
    """Enough of an engine for its metrics."""

    stats = LoopStats()

    class card:  # noqa: N801
        block_size, num_blocks, gpu, max_loras, kv_dtype = 16, 10, None, 0, "float32"


def exported(model_name: str) -> dict[str, set[str]]:
    """Names of our metrics, and the labels of each."""
    text = Metrics(model_name, Engine()).render("text/plain")[0].decode()  # type: ignore[arg-type]
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"(?m)^([a-z:_]+)\{([^}]*)\}", text):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    assert f'model_name="{model_name}"' in text
    return found


def queries(case: Case) -> list[tuple[str, str]]:
    """Deployment and query of every trigger of a case."""
    found = []
    for document in case.documents:
        spec = document.get("spec", {})
        if document["kind"] == "ScaledObject":
            found += [(spec["scaleTargetRef"]["name"], each["metadata"]["query"]) for each in spec["triggers"]]
        elif document["kind"] == "InferenceService":
            metrics = spec["predictor"].get("autoScaling", {}).get("metrics", ())
            name = f"{document['metadata']['name']}-predictor"
            found += [(name, each["external"]["metric"]["query"]) for each in metrics]
    return found


def test_metrics_are_those_that_are_exported() -> None:
    ours, seen = exported("m"), 0
    for case in CASES:
        for _, query in queries(case):
            [name] = re.findall(r"vllm:\w+", query)
            assert name in ours and "model_name" in ours[name]
            seen += 1
    assert seen > 50
    assert set(PICKED) <= set(ours) and ENGINE_LABEL == {"llm-d.ai/engine-type": "vllm"}
    assert {"block_size", "num_gpu_blocks"} <= ours["vllm:cache_config_info"]


@pytest.mark.parametrize("case", [case for case in CASES if queries(case)], ids=lambda case: case.id)
def test_a_query_gives_one_number_of_the_right_pods(case: Case) -> None:
    deployments = {deployment for deployment, _ in queries(case)}
    for deployment, query in queries(case):
        assert query.startswith("sum(") and query.count("(") == query.count(")")
        pods = re.search(r'pod=~"([^"]*)"', query)[1]  # type: ignore[index]
        for each in {*deployments, f"{deployment}-b", f"a{deployment}", deployment + "2"}:
            pod = f"{each}-1234567890-abcde"
            assert each not in deployments or len(pod) - 5 <= 58, "Kubernetes would cut it"
            assert bool(re.fullmatch(pods, pod)) == (each == deployment)
        wanted = case.workload.deploy.namespace or ("default" if case.kind == "llm-d" else None)
        assert (f'namespace="{wanted}"' in query) == (wanted is not None)
        name = case.workload.name if case.kind == "kserve" else case.workload.model_name
        assert f'model_name="{name}"' in query


def test_by_rate_and_by_queue() -> None:
    by_rate = triggers(workload_of({}, {"requests_per_second": 0.5}), "d")
    assert [(each.name, each.target) for each in by_rate] == [("requests", "0.5"), ("waiting", "5")]
    assert by_rate[0].query == (
        'sum(rate(vllm:request_success_total{model_name="SmolLM2-135M-Instruct",pod=~"d-[^-]+-[^-]+"}[2m]))'
    )
    by_queue = triggers(workload_of({}, {"scale_on": "queue", "waiting_requests": 7}), "d")
    assert [(each.name, each.target) for each in by_queue] == [("waiting", "7")]


def test_a_name_with_quotes_stays_one_name() -> None:
    [trigger] = triggers(workload_of({"served_model_name": ('a"} or vector(1)',)}, {"scale_on": "queue"}), "d")
    assert r'model_name="a\"} or vector(1)"' in trigger.query


def scalers(kind: str, **deploy: Any) -> list[Document]:
    workload = workload_of({"model": "org/some-7B"}, {"engine": "vllm", "gpu": "A10G", "name": LONGEST, **deploy})
    documents = Case("", kind, workload).documents
    return [each for each in documents if each["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")]


@pytest.mark.parametrize("kind", ["keda", "llm-d", "llmisvc"])
def test_prompts_and_answers_are_scaled_apart(kind: str) -> None:
    prefill, decode = scalers(kind, prefill_replicas=2, max_prefill_replicas=3, min_replicas=1, max_replicas=9)
    bounds = [(each["spec"]["minReplicaCount"], each["spec"]["maxReplicaCount"]) for each in (prefill, decode)]
    assert bounds == [(2, 3), (1, 9)]
    assert prefill["spec"]["scaleTargetRef"]["name"].endswith("-prefill")


def test_the_scaler_of_keda_is_that_of_llm_d() -> None:
    for more in ({}, {"prefill_replicas": 1}):
        assert scalers("keda", namespace="models", **more) == scalers("llm-d", namespace="models", **more)


def test_an_hpa_asks_for_what_the_adapter_offers() -> None:
    [autoscaler] = scalers("kubernetes", autoscaler="hpa", min_replicas=2)
    names = [each["pods"]["metric"]["name"] for each in autoscaler["spec"]["metrics"]]
    assert names == ["llm_requests_per_second", "llm_requests_waiting"]
    assert (autoscaler["spec"]["minReplicas"], autoscaler["spec"]["maxReplicas"]) == (2, 10)
    assert scalers("kubernetes", autoscaler="keda") == [], "needs an operator: a kind of its own"
    assert len(scalers("llm-d", autoscaler="hpa", prefill_replicas=1)) == 2


def test_our_metrics_are_read_with_the_key() -> None:
    workload = workload_of({}, {"api_key_secret": "keys", "pod_monitor": True})
    [monitor] = [each for each in Case("", "kubernetes", workload).documents if each["kind"] == "PodMonitor"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "keys", "key": "api-key"}
    [deployment] = [each for each in Case("", "kubernetes", workload).documents if each["kind"] == "Deployment"]
    assert "annotations" not in deployment["spec"]["template"]["metadata"], "else each pod is read twice"
