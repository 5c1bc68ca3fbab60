"""llm-d's endpoint picker: which pod takes a request, by the prompts each has seen and how busy it is.

Does: its configuration, and the Deployment, Service and rights it runs with. Does not: run without a Gateway that asks it
(Gateway API Inference Extension).

Both engines export vLLM's metrics, from which the picker knows queues and memory: `vllm:num_requests_waiting`,
`vllm:num_requests_running`, `vllm:kv_cache_usage_perc` and `vllm:cache_config_info` (`telemetry/engine_state.py`).
"""

from __future__ import annotations

from tonle.deploy.document import Document, yaml_text
from tonle.deploy.pod import labels, metadata, no_privileges
from tonle.deploy.workload import Workload

ROUTER_VERSION = "v0.10.0"  # of llm-d-router
PICKER_IMAGE = f"ghcr.io/llm-d/llm-d-router-endpoint-picker:{ROUTER_VERSION}"
SIDECAR_IMAGE = f"ghcr.io/llm-d/llm-d-router-disagg-sidecar:{ROUTER_VERSION}"
PICK_PORT, HEALTH_PORT, METRICS_PORT = 9002, 9003, 9090
ENGINE_LABEL = {"llm-d.ai/engine-type": "vllm"}  # whose names the metrics have
_POOL_GROUP = "inference.networking.k8s.io"
_REMOTE_PREFILL_TOKENS = 256  # of a prompt, not cached in the decode pod: fewer are not worth a transfer
_FILE = "endpoint-picker.yaml"


def configuration(*, disaggregated: bool) -> Document:
    """An EndpointPickerConfig. A cached prefix counts most; then short queues and free memory."""
    head = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
    weighed = [
        _weighed("prefix-cache-scorer", 3),
        _weighed("queue-scorer", 2),
        _weighed("kv-cache-utilization-scorer", 2),
    ]
    scorers = ["prefix-cache-scorer", "queue-scorer", "kv-cache-utilization-scorer"]
    picker = {"pluginRef": "max-score-picker"}
    if not disaggregated:
        plugins = ["single-profile-handler", *scorers, "max-score-picker"]
        profiles = [{"name": "default", "plugins": [*weighed, picker]}]
        return {**head, "plugins": [{"type": each} for each in plugins], "schedulingProfiles": profiles}
    decider = {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": _REMOTE_PREFILL_TOKENS}}
    handler = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": decider["type"]}}}
    plugins = ["prefill-filter", "decode-filter", *scorers, "active-request-scorer", "max-score-picker"]
    decoding = [_weighed("active-request-scorer", 2), _weighed("prefix-cache-scorer", 3)]
    return {
        **head,
        "plugins": [*({"type": each} for each in plugins), decider, handler],
        "schedulingProfiles": [
            {"name": "prefill", "plugins": [{"pluginRef": "prefill-filter"}, *weighed, picker]},
            {"name": "decode", "plugins": [{"pluginRef": "decode-filter"}, *decoding, picker]},
        ],
    }


def _weighed(plugin: str, weight: int) -> Document:
    return {"pluginRef": plugin, "weight": weight}


def picker_name(workload: Workload) -> str:
    return f"{workload.name}-epp"


def endpoint_picker(workload: Workload, *, disaggregated: bool) -> list[Document]:
    """Everything it runs with. The namespace is set: a RoleBinding must name it."""
    name, own = picker_name(workload), labels(workload, name=picker_name(workload))
    meta = {**metadata(workload, name), "labels": own}
    ports = [
        {"name": "grpc-ext-proc", "port": PICK_PORT, "protocol": "TCP", "appProtocol": "kubernetes.io/h2c"},
        {"name": "http-metrics", "port": METRICS_PORT, "protocol": "TCP"},
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": meta, "rules": _rules()},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": workload.deploy.namespace}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": meta,
            "data": {_FILE: yaml_text(configuration(disaggregated=disaggregated))},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": meta,
            "spec": {
                # One: what it has learnt of prompts is in its memory, and two would each know half.
                "replicas": 1,
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": own},
                "template": {"metadata": {"labels": own}, "spec": _pod(workload, name)},
            },
        },
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"selector": own, "ports": ports}},
    ]


def _rules() -> list[Document]:
    read = ["get", "watch", "list"]
    return [
        {"apiGroups": [""], "resources": ["pods"], "verbs": read},
        {"apiGroups": [_POOL_GROUP], "resources": ["inferencepools"], "verbs": read},
        *(
            {"apiGroups": [group], "resources": ["inferenceobjectives", "inferencemodelrewrites"], "verbs": read}
            for group in ("llm-d.ai", "inference.networking.x-k8s.io")
        ),
    ]


def _pod(workload: Workload, name: str) -> Document:
    probe = {"grpc": {"port": HEALTH_PORT, "service": "inference-extension"}}
    return {
        "serviceAccountName": name,
        "terminationGracePeriodSeconds": workload.grace_period_s,  # as long as a pod that it may have chosen last
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "epp",
                "image": PICKER_IMAGE,
                "args": [
                    f"--pool-name={workload.name}",
                    f"--pool-namespace={workload.deploy.namespace}",
                    f"--pool-group={_POOL_GROUP}",
                    f"--config-file=/config/{_FILE}",
                    f"--grpc-port={PICK_PORT}",
                    f"--grpc-health-port={HEALTH_PORT}",
                    "--metrics-endpoint-auth=false",  # else it needs rights in the whole cluster
                    "--tracing=false",
                    "--zap-encoder=json",
                ],
                "env": [
                    {"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
                    {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                ],
                "ports": [
                    {"name": "grpc", "containerPort": PICK_PORT},
                    {"name": "grpc-health", "containerPort": HEALTH_PORT},
                    {"name": "metrics", "containerPort": METRICS_PORT},
                ],
                "livenessProbe": {**probe, "initialDelaySeconds": 5, "periodSeconds": 10},
                "readinessProbe": {**probe, "periodSeconds": 2},
                "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "8Gi"}},
                "securityContext": no_privileges(),
                "volumeMounts": [{"name": "config", "mountPath": "/config", "readOnly": True}],
            }
        ],
        "volumes": [{"name": "config", "configMap": {"name": name}}],
    }
