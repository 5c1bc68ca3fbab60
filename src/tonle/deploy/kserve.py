"""`tonle deploy render kserve`: how KServe runs the engine (ServingRuntime), and the service itself (InferenceService).

Does: KServe's Standard mode, where it makes a Deployment and an autoscaler of KEDA's. Does not: Knative, whose proxy in front of
each pod counts requests per second by itself, but cuts long answers (a timeout per request) and starts no GPU pod in time for
the request that waits for it; nor prefill and decode in separate pods (`llmisvc.py`, `llm_d.py`).

The runtime belongs to this service alone and is named by it (autoSelect is off): it holds the service's flags and times.
"""

from __future__ import annotations

from tonle.deploy.autoscaling import behavior, check_replicas, triggers
from tonle.deploy.document import Document, RenderedFile
from tonle.deploy.kubernetes import ROLLING_UPDATE, disruption_budget
from tonle.deploy.monitoring import check_metrics, pod_monitors, scrape_annotations
from tonle.deploy.pod import container, metadata, pod_settings, resources, volumes
from tonle.deploy.workload import MODELS, Workload
from tonle.errors import ConfigError

_PORT = 8080  # where KServe expects a model server
_FORMATS = {"tonle": "tonle", "vllm": "vLLM"}  # what KServe calls the format of a model that this engine loads


def render(workload: Workload) -> list[RenderedFile]:
    if workload.deploy.prefill_replicas:
        raise ConfigError(
            "prefill_replicas: an InferenceService has one kind of pod; render llmisvc, KServe's kind with two, or llm-d",
            param="prefill_replicas",
        )
    check_replicas(workload)
    check_metrics(workload)
    check_autoscaler(workload)
    selected = {"serving.kserve.io/inferenceservice": workload.name}  # a label that KServe sets
    documents = [
        *service_account(workload),
        inference_service(workload, selected),
        disruption_budget(workload, selected),
        *pod_monitors(workload, selected),
    ]
    return [
        RenderedFile(f"{workload.deploy.engine}-runtime.yaml", [serving_runtime(workload)], workload.resources.reason),
        RenderedFile("kserve-inferenceservice.yaml", documents),
    ]


def check_autoscaler(workload: Workload) -> None:
    """Raises `ConfigError`."""
    if workload.deploy.autoscaler == "hpa":
        raise ConfigError(
            "autoscaler: hpa knows only cores and memory with KServe, which say little of a model's load; set autoscaler: keda "
            "or none",
            param="autoscaler",
        )


def serving_runtime(workload: Workload) -> Document:
    is_brought = workload.storage_uri is not None
    args = workload.args(MODELS if is_brought else None, port=_PORT, served_name="{{.Name}}")
    server = container(workload, args, name="kserve-container", port=_PORT)
    del server["resources"]  # of the service
    read = scrape_annotations(workload, _PORT)
    if read:
        read |= {"prometheus.kserve.io/port": str(_PORT), "prometheus.kserve.io/path": "/metrics"}
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": metadata(workload),
        "spec": {
            **({"annotations": read} if read else {}),
            "supportedModelFormats": [{"name": _FORMATS[workload.deploy.engine], "version": "1", "autoSelect": False}],
            "containers": [server],
            "volumes": volumes(workload, fetches=not is_brought),
        },
    }


def inference_service(workload: Workload, selected: dict[str, str]) -> Document:
    deploy, name = workload.deploy, workload.name
    noted = {"serving.kserve.io/deploymentMode": "Standard", "serving.kserve.io/autoscalerClass": deploy.autoscaler}
    account = {"serviceAccountName": name} if deploy.hub_token_secret else {}
    model: Document = {
        "modelFormat": {"name": _FORMATS[deploy.engine], "version": "1"},
        "runtime": name,
        **({"storageUri": workload.storage_uri} if workload.storage_uri else {}),
        "resources": resources(workload),
    }
    is_scaled = deploy.autoscaler == "keda"
    predictor: Document = {
        "minReplicas": deploy.min_replicas,
        "maxReplicas": deploy.max_replicas if is_scaled else deploy.min_replicas,
        **({"autoScaling": auto_scaling(workload)} if is_scaled else {}),
        "deploymentStrategy": ROLLING_UPDATE,
        **pod_settings(workload, selected),
        **account,
        "model": model,
    }
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": metadata(workload, annotations=noted),
        "spec": {"predictor": predictor},
    }


def auto_scaling(workload: Workload) -> Document:
    """KServe makes a trigger of KEDA's from each, whose threshold counts per replica whatever the target's type says."""
    found = triggers(workload, f"{workload.name}-predictor", model_name=workload.name)
    return {
        "metrics": [
            {
                "type": "External",
                "external": {
                    "metric": {
                        "backend": "prometheus",
                        "serverAddress": workload.deploy.prometheus_url,
                        "query": each.query,
                    },
                    "target": {"type": "Value", "value": each.target},
                },
            }
            for each in found
        ],
        "behavior": behavior(),
    }


def service_account(workload: Workload) -> list[Document]:
    """KServe fetches the model in a container of its own, with the secrets of the pod's account."""
    secret = workload.deploy.hub_token_secret
    if secret is None:
        return []
    made = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(workload), "secrets": [{"name": secret}]}
    return [made]
