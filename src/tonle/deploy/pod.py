"""The container of a pod and what surrounds it, as Kubernetes kinds share it: probes, resources, volumes, security.

Does: plain dictionaries in Kubernetes' own words. Does not: choose kinds (`kubernetes.py`, `kserve.py`, `llm_d.py`).
"""

from __future__ import annotations

from typing import Any

from tonle.deploy.document import Document
from tonle.deploy.workload import PORT, PRE_STOP_S, Workload

USER_ID = 10001  # of the images' user
GIB = 1024**3
MIB = 1024**2


def labels(workload: Workload, role: str | None = None) -> dict[str, str]:
    own = {"app.kubernetes.io/name": workload.name, "app.kubernetes.io/part-of": "tonle"}
    return own if role is None else own | {"llm-d.ai/role": role}


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
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "cache", "mountPath": workload.cache_dir},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def environment(workload: Workload) -> list[Document]:
    plain: list[Document] = [{"name": name, "value": value} for name, value in workload.environment().items()]
    deploy = workload.deploy
    if deploy.api_key_secret is not None:
        variable = "TONLE_API_KEY" if workload.is_ours else "VLLM_API_KEY"
        plain.append(_from_secret(variable, deploy.api_key_secret, "api-key"))
    if deploy.hub_token_secret is not None:
        plain.append(_from_secret("HF_TOKEN", deploy.hub_token_secret, "token"))
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
    """Memory and GPUs are fixed; cores may be borrowed where they are free."""
    needed = workload.resources
    fixed = {"memory": quantity(needed.memory_bytes)}
    if needed.gpus:
        fixed["nvidia.com/gpu"] = str(needed.gpus)
    return {"requests": {"cpu": str(needed.cpu), **fixed}, "limits": dict(fixed)}


def quantity(num_bytes: int) -> str:
    return f"{num_bytes // GIB}Gi" if num_bytes % GIB == 0 else f"{-(-num_bytes // MIB)}Mi"


def volumes(workload: Workload, *, claim: str | None = None) -> list[Document]:
    size = workload.deploy.model_cache.removesuffix("B")
    cache: Document = (
        {"persistentVolumeClaim": {"claimName": claim}} if claim is not None else {"emptyDir": {"sizeLimit": size}}
    )
    return [
        {"name": "cache", **cache},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]


def pod_settings(workload: Workload) -> Document:
    """What stands beside the containers of a pod."""
    deploy = workload.deploy
    settings: Document = {
        "terminationGracePeriodSeconds": workload.grace_period_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # variables of other services have names like our settings
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip
    if workload.resources.gpu is not None:
        settings["nodeSelector"] = {"nvidia.com/gpu.product": workload.resources.gpu.node_label}
        settings["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if deploy.spread:
        settings["topologySpreadConstraints"] = [
            {
                "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels(workload)},
            }
        ]  # fmt: skip
    return settings
