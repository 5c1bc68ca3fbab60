"""The container of a pod and what surrounds it, as Kubernetes kinds share it: probes, resources, volumes, security.

Does: plain dictionaries in Kubernetes' own words. Does not: choose kinds (`kubernetes.py`, `kserve.py`, `llm_d.py`).
"""

from __future__ import annotations

from typing import Any

from tonle.deploy.document import Document
from tonle.deploy.units import quantity
from tonle.deploy.workload import CACHE, PORT, PRE_STOP_S, Workload

USER_ID = 10001  # of the images' user
API_KEY_ENTRY = "api-key"  # of the Secret
NAME_LABEL = "app.kubernetes.io/name"
ROLE_LABEL = "llm-d.ai/role"


def labels(workload: Workload, role: str | None = None, *, name: str | None = None) -> dict[str, str]:
    own = {NAME_LABEL: name or workload.name, "app.kubernetes.io/part-of": "tonle"}
    return own if role is None else own | {ROLE_LABEL: role}


def metadata(workload: Workload, name: str | None = None, **more: Any) -> Document:
    space = {"namespace": workload.deploy.namespace} if workload.deploy.namespace else {}
    return {"name": name or workload.name, **space, "labels": labels(workload), **more}


def container(
    workload: Workload, args: list[str], *, name: str = "server", port: int = PORT, more_env: tuple[Document, ...] = ()
) -> Document:
    return {
        "name": name,
        "image": workload.image,
        "command": workload.command(),
        "args": args,
        "env": [*environment(workload), *more_env],
        "ports": [{"name": "http", "containerPort": port, "protocol": "TCP"}],
        **probes(workload, port),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},  # Kubernetes 1.30 and later
        "resources": resources(workload),
        "securityContext": no_privileges(read_only=not workload.resources.gpus),
        "volumeMounts": [
            {"name": "cache", "mountPath": CACHE},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def no_privileges(*, read_only: bool = True) -> Document:
    """Of a container. Ours works with a read-only root; with a GPU it is left writable all the same: NVIDIA's hooks write to
    it before the container starts, and where they cannot, it does not start."""
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": read_only, "capabilities": {"drop": ["ALL"]}}


def environment(workload: Workload) -> list[Document]:
    plain: list[Document] = [{"name": name, "value": value} for name, value in workload.environment().items()]
    deploy = workload.deploy
    if deploy.api_key_secret is not None:
        plain.append(_from_secret(workload.api_key_variable, deploy.api_key_secret, API_KEY_ENTRY))
    if deploy.hub_token_secret is not None:
        plain.append(_from_secret("HF_TOKEN", deploy.hub_token_secret, "HF_TOKEN"))
    return plain


def _from_secret(variable: str, secret: str, key: str) -> Document:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def probes(workload: Workload, port: int) -> Document:
    """Started: ready once. Ready: takes requests, so not while draining. Alive: the process answers at all."""

    def get(path: str) -> Document:
        return {"httpGet": {"path": path, "port": port}}

    return {
        "startupProbe": {
            **get(workload.ready_path), "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": workload.start_s // 5,
        },
        "readinessProbe": {**get(workload.ready_path), "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**get(workload.live_path), "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
    }  # fmt: skip


def resources(workload: Workload) -> Document:
    """Without limits of their own, memory is fixed, and cores may be borrowed where they are free."""
    needed = workload.resources
    gpus = {"nvidia.com/gpu": str(needed.gpus)} if needed.gpus else {}
    cores = {"cpu": str(needed.cpu_limit)} if needed.cpu_limit else {}
    return {
        "requests": {"cpu": str(needed.cpu), "memory": quantity(needed.memory_bytes), **gpus},
        "limits": {**cores, "memory": quantity(needed.memory_limit_bytes), **gpus},
    }


def volumes(workload: Workload, *, fetches: bool) -> list[Document]:
    """Each pod has a cache of its own: a shared one would hold kernels compiled for other nodes, and locks over NFS.

    `fetches`: the pod keeps the model there, too.
    """
    num_bytes = workload.resources.fetch_bytes if fetches else workload.resources.cache_bytes
    shared = "8Gi" if workload.resources.gpus > 1 else "1Gi"  # GPUs of one model talk through it
    return [
        {"name": "cache", "emptyDir": {"sizeLimit": quantity(num_bytes)}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "2Gi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared}},
    ]


def pod_settings(workload: Workload, selected: dict[str, str] | None) -> Document:
    """What stands beside the containers of a pod. `selected`: the labels of all replicas; None: they are not spread."""
    settings: Document = {
        "terminationGracePeriodSeconds": workload.grace_period_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # variables of other services have names like our settings
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip
    return settings | _placement(workload, selected)


def _placement(workload: Workload, selected: dict[str, str] | None) -> Document:
    """Which nodes: those with the GPU, and if possible not two replicas on one."""
    settings: Document = {}
    if workload.resources.gpu is not None:
        product = {
            "key": "nvidia.com/gpu.product",
            "operator": "In",
            "values": list(workload.resources.gpu.node_labels),
        }
        required = {"nodeSelectorTerms": [{"matchExpressions": [product]}]}
        settings["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        settings["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if workload.deploy.spread and selected is not None:
        settings["topologySpreadConstraints"] = [
            {
                "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selected},
            }
        ]  # fmt: skip
    return settings
