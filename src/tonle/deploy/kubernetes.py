"""`tonle deploy render kubernetes`: plain Kubernetes, without any operator: Deployment, Service, and what keeps them safe.

Does: one workload, whose pods fetch their model from the hub or find it on a claim that is there. Does not: fill that claim,
or route by prefix (`llm_d.py`).
"""

from __future__ import annotations

from urllib.parse import urlsplit

from tonle.deploy.autoscaling import Scaled, adapter_values, autoscalers, check_replicas, replicas
from tonle.deploy.discovery_rights import discovery_rights
from tonle.deploy.document import Document, RenderedFile
from tonle.deploy.model_source import claim, hub_model
from tonle.deploy.monitoring import check_metrics, pod_monitors, scrape_annotations
from tonle.deploy.pod import NAME_LABEL, container, labels, metadata, pod_settings, volumes
from tonle.deploy.workload import MODELS, PORT, Workload
from tonle.errors import ConfigError

_SLACK_S = 300  # for pulling the image, before a rollout counts as stuck
# A new pod is ready before an old one goes.
ROLLING_UPDATE: Document = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}


def render(workload: Workload) -> list[RenderedFile]:
    if workload.deploy.prefill_replicas:
        raise ConfigError(
            "prefill_replicas needs a router that knows prefill pods from decode pods: render llm-d or llmisvc",
            param="prefill_replicas",
        )
    check_replicas(workload)
    check_metrics(workload)
    scaled = Scaled(workload.name, workload.deploy.min_replicas, workload.deploy.max_replicas)
    by_keda = workload.deploy.autoscaler == "keda"
    documents = [
        deployment(workload, scaled),
        service(workload),
        disruption_budget(workload, labels(workload)),
        network_policy(workload),
        *([] if by_keda else autoscalers(workload, [scaled])),  # KEDA's is a kind of its own: it needs an operator
        *pod_monitors(workload, labels(workload)),
        *discovery_rights(workload),
    ]
    note = "\nReplicas are added by KEDA: tonle deploy render keda. Until then there is one."
    files = [RenderedFile("kubernetes.yaml", documents, workload.resources.reason + (note if by_keda else ""))]
    return [*files, *adapter_file(workload)]


def adapter_file(workload: Workload) -> list[RenderedFile]:
    if workload.deploy.autoscaler != "hpa":
        return []
    comment = (
        "The HorizontalPodAutoscaler's metrics come from prometheus-adapter:\n"
        "helm install prometheus-adapter prometheus-community/prometheus-adapter --values prometheus-adapter-values.yaml"
    )
    return [RenderedFile("prometheus-adapter-values.yaml", body=adapter_values(workload), comment=comment)]


def deployment(
    workload: Workload, scaled: Scaled, *, role: str | None = None, pod: Document | None = None,
    more_labels: dict[str, str] | None = None, metrics_port: int = PORT,
) -> Document:  # fmt: skip
    """`pod`: its spec, if it is not one server. `role`: prefill or decode, where pods do one of them."""
    own = labels(workload, role)
    noted = {"annotations": found} if (found := scrape_annotations(workload, metrics_port)) else {}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(workload, scaled.deployment),
        "spec": {
            **replicas(workload, scaled),
            "selector": {"matchLabels": own},
            "strategy": ROLLING_UPDATE,
            "progressDeadlineSeconds": workload.start_s + _SLACK_S,
            "template": {
                "metadata": {"labels": own | (more_labels or {}), **noted},
                "spec": pod or server_pod(workload, role=role),
            },
        },
    }


def server_pod(
    workload: Workload, *, role: str | None = None, port: int = PORT, more_args: tuple[str, ...] = (),
    more_env: tuple[Document, ...] = (),
) -> Document:  # fmt: skip
    """The spec of a pod that finds its model itself: on the hub, or on a claim."""
    on_claim = claim(workload)
    instead = "pvc://claim/path; or render kserve, which fetches it"
    model = MODELS if on_claim else hub_model(workload, "the pods of this kind", instead=instead)
    # On a claim it would be called after its folder in the container.
    served = workload.model_name if on_claim and not workload.serve.served_model_name else None
    args = workload.args(model, port=port, served_name=served, more=more_args)
    server = container(workload, args, port=port, more_env=more_env)
    settings = pod_settings(workload, labels(workload, role))
    pod = {**settings, "containers": [server], "volumes": volumes(workload, fetches=not on_claim)}
    if on_claim:
        name, path = on_claim
        mount = {"name": "model", "mountPath": MODELS, "readOnly": True}
        server["volumeMounts"].append(mount | ({"subPath": path} if path else {}))
        pod["volumes"].append({"name": "model", "persistentVolumeClaim": {"claimName": name, "readOnly": True}})
    return pod


def service(workload: Workload) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(workload),
        "spec": {
            "selector": labels(workload),
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "appProtocol": "http"}],
        },
    }


def disruption_budget(workload: Workload, selected: dict[str, str], name: str | None = None) -> Document:
    """A drained node takes one replica at a time; a single replica does not keep a node from being drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(workload, name),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selected}},
    }


def network_policy(workload: Workload, *, ports: tuple[int, ...] = (PORT,), among_themselves: bool = False) -> Document:
    """Callers reach the API's port and nothing else; the pods reach names, and HTTPS if they fetch their model.

    `ports`: all of them, for callers and for Prometheus. `among_themselves`: the pods also send KV cache to each other, on
    ports of their own choice.
    """
    own = {"podSelector": {"matchLabels": {NAME_LABEL: workload.name}}}
    callers: Document = {"ports": [{"port": port, "protocol": "TCP"} for port in ports]}
    if workload.deploy.allowed_namespaces:
        named = [{"matchLabels": {"kubernetes.io/metadata.name": name}} for name in workload.deploy.allowed_namespaces]
        callers["from"] = [{"podSelector": {}}, *({"namespaceSelector": each} for each in named)]
    names = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    out = [443] if claim(workload) is None else []
    if workload.is_ours and "://" in (workload.serve.cache or ""):
        out.append(urlsplit(workload.serve.cache).port or 6379)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(workload),
        "spec": {
            "podSelector": {"matchLabels": {NAME_LABEL: workload.name}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [callers, *([{"from": [own]}] if among_themselves else [])],
            "egress": [
                names,
                *({"ports": [{"port": port, "protocol": "TCP"}]} for port in out),
                *([{"to": [own]}] if among_themselves else []),
            ],
        },
    }
