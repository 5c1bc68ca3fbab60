"""`tonle deploy render llm-d`: model servers behind llm-d's endpoint picker, which knows whose cache holds a prompt's beginning.

Does: pool, route, picker and model servers as plain documents, so that no chart is needed and all of it can be checked; with
`prefill_replicas`, prefill and decode in separate pods, each with its own scaler. Does not: install the Gateway or the
CRDs (Gateway API, its Inference Extension, KEDA).
"""

from __future__ import annotations

from dataclasses import replace

from tonle.deploy.autoscaling import autoscalers, check_replicas
from tonle.deploy.document import Document, RenderedFile
from tonle.deploy.endpoint_picker import ENGINE_LABEL, PICK_PORT, SIDECAR_IMAGE, endpoint_picker, picker_name
from tonle.deploy.kubernetes import adapter_file, deployment, disruption_budget, network_policy, server_pod
from tonle.deploy.monitoring import check_metrics, check_router, pod_monitors
from tonle.deploy.pod import NAME_LABEL, labels, metadata, no_privileges
from tonle.deploy.prefill import KV_TRANSFER, SIDE_CHANNEL, is_disaggregated, scaled_deployments
from tonle.deploy.workload import PORT, Workload

_BEHIND_SIDECAR_PORT = 8200  # of vLLM in decode pods: the sidecar has PORT, and asks a prefill pod first
_POOL = "inference.networking.k8s.io"


def render(workload: Workload) -> list[RenderedFile]:
    check_replicas(workload)
    check_router(workload, "llm-d")
    check_metrics(workload)
    workload = replace(workload, deploy=replace(workload.deploy, namespace=workload.deploy.namespace or "default"))
    disaggregated = is_disaggregated(workload)
    everything = {NAME_LABEL: workload.name}
    documents = [
        *endpoint_picker(workload, disaggregated=disaggregated),
        inference_pool(workload, everything),
        http_route(workload),
        *model_servers(workload, disaggregated=disaggregated),
        network_policy(
            workload, ports=(PORT, _BEHIND_SIDECAR_PORT) if disaggregated else (PORT,), among_themselves=disaggregated
        ),
        *autoscalers(workload, scaled_deployments(workload)),
        *pod_monitors(workload, everything),
    ]
    comment = (
        f"{workload.resources.reason}\n"
        "Needs the Gateway API with its Inference Extension, and a Gateway that supports it."
    )
    return [RenderedFile("llm-d-configuration.yaml", documents, comment), *adapter_file(workload)]


def inference_pool(workload: Workload, selected: dict[str, str]) -> Document:
    return {
        "apiVersion": f"{_POOL}/v1",
        "kind": "InferencePool",
        "metadata": metadata(workload),
        "spec": {
            "targetPorts": [{"number": PORT}],
            "selector": {"matchLabels": selected},
            # FailOpen: without the picker, requests still reach some pod
            "endpointPickerRef": {
                "name": picker_name(workload),
                "port": {"number": PICK_PORT},
                "failureMode": "FailOpen",
            },
        },
    }


def http_route(workload: Workload) -> Document:
    namespace, _, name = workload.deploy.gateway.rpartition("/")
    parent = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": name}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": metadata(workload),
        "spec": {
            "parentRefs": [parent | ({"namespace": namespace} if namespace else {})],
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                    "backendRefs": [{"group": _POOL, "kind": "InferencePool", "name": workload.name}],
                    "timeouts": {"request": "0s"},  # none: an answer takes as long as it takes
                }
            ],
        },
    }


def model_servers(workload: Workload, *, disaggregated: bool) -> list[Document]:
    scaled = scaled_deployments(workload)
    if not disaggregated:
        budget = disruption_budget(workload, labels(workload))
        return [deployment(workload, scaled[0], more_labels=ENGINE_LABEL), budget]
    prefill, decode = scaled
    documents = []
    for each, role, pod, port in (
        (prefill, "prefill", _prefill_pod(workload), PORT),
        (decode, "decode", _decode_pod(workload), _BEHIND_SIDECAR_PORT),
    ):
        made = deployment(workload, each, role=role, pod=pod, more_labels=ENGINE_LABEL, metrics_port=port)
        documents += [made, disruption_budget(workload, labels(workload, role), each.deployment)]
    return documents


def _prefill_pod(workload: Workload) -> Document:
    return server_pod(workload, role="prefill", more_args=(KV_TRANSFER,), more_env=SIDE_CHANNEL)


def _decode_pod(workload: Workload) -> Document:
    pod = server_pod(
        workload, role="decode", port=_BEHIND_SIDECAR_PORT, more_args=(KV_TRANSFER,), more_env=SIDE_CHANNEL
    )
    sidecar = {
        "name": "routing-sidecar",
        "image": SIDECAR_IMAGE,
        "restartPolicy": "Always",  # beside the server, not before it; and it ends after it
        "args": [
            f"--port={PORT}",
            f"--model-server-port={_BEHIND_SIDECAR_PORT}",
            "--kv-connector=nixlv2",
            "--secure-proxy=false",  # TLS ends at the Gateway
        ],
        "ports": [{"name": "api", "containerPort": PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": no_privileges(),
    }
    return {**pod, "initContainers": [sidecar]}
