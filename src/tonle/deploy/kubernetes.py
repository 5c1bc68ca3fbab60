"""`tonle deploy render kubernetes`: plain Kubernetes, without any operator: Deployment, Service, and what keeps them safe.

Does: one workload, whose pods fetch their model from the hub or find it on a claim that is there. Does not: fill that claim,
or route by prefix (`llm_d.py`).
"""

from __future__ import annotations

from urllib.parse import urlsplit

from tonle.deploy.autoscaling import Scaled, adapter_values, autoscalers, check_replicas, replicas
from tonle.deploy.document import Document, RenderedFile
from tonle.deploy.monitoring import check_metrics, pod_monitors, scrape_annotations
from tonle.deploy.pod import NAME_LABEL, container, labels, metadata, pod_settings, volumes
from tonle.deploy.workload import MODELS, PORT, Workload
from tonle.errors import ConfigError

_SLACK_S = 300  # for pulling the image, before a rollout counts as stuck


def render(workload: Workload) -> list[RenderedFile]:
    if workload.deploy.prefill_replicas:
        raise ConfigError(
            "prefill_replicas needs a router that sends a prompt to one pod and its answer to another: render llm-d or llmisvc",
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
    """`pod`: its spec, if it is not one server. `role`: where prompts and answers are computed apart."""
    own = labels(workload, role)
    noted = {"annotations": found} if (found := scrape_annotations(workload, metrics_port)) else {}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(workload, scaled.deployment),
        "spec": {
            **replicas(workload, scaled),
            "selector": {"matchLabels": own},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
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
    claim = _claim(workload)
    model = MODELS if claim else _hub_model(workload)
    # On a claim it would be called after its folder here.
    served = workload.model_name if claim and not workload.serve.served_model_name else None
    args = workload.args(model, port=port, served_name=served, more=more_args)
    server = container(workload, args, port=port, more_env=more_env)
    pod = {**pod_settings(workload, role), "containers": [server], "volumes": volumes(workload, fetches=not claim)}
    if claim:
        name, path = claim
        mount = {"name": "model", "mountPath": MODELS, "readOnly": True}
        server["volumeMounts"].append(mount | ({"subPath": path} if path else {}))
        pod["volumes"].append({"name": "model", "persistentVolumeClaim": {"claimName": name, "readOnly": True}})
    return pod


def _claim(workload: Workload) -> tuple[str, str] | None:
    """Name and path of pvc://NAME/PATH. Several replicas read it, so that it must allow ReadOnlyMany or ReadWriteMany."""
    uri = workload.deploy.storage_uri
    if uri is None or not uri.startswith("pvc://"):
        return None
    name, _, path = uri.removeprefix("pvc://").partition("/")
    return name, path.strip("/")


def _hub_model(workload: Workload) -> str | None:
    uri = workload.deploy.storage_uri
    if uri is None:
        return workload.model
    scheme, _, rest = uri.partition("://")
    if scheme == "hf" and ":" not in rest:
        return rest
    raise ConfigError(
        f"storage_uri: {uri} is fetched by KServe alone; here, use pvc://claim/path or hf://org/name, or render kserve",
        param="storage_uri",
    )


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

    `ports`: all of them, for callers and for Prometheus. `among_themselves`: the pods also hand keys and values to each
    other, on ports of their own choice.
    """
    own = {"podSelector": {"matchLabels": {NAME_LABEL: workload.name}}}
    callers: Document = {"ports": [{"port": port, "protocol": "TCP"} for port in ports]}
    if workload.deploy.allowed_namespaces:
        named = [{"matchLabels": {"kubernetes.io/metadata.name": name}} for name in workload.deploy.allowed_namespaces]
        callers["from"] = [{"podSelector": {}}, *({"namespaceSelector": each} for each in named)]
    names = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    out = [443] if _claim(workload) is None else []
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
