"""`tonle deploy render kubernetes`: plain Kubernetes, without any operator: Deployment, Service, and what keeps them safe.

Does: one workload. Does not: scale it (`keda.py`), or route by prefix (`llm_d.py`).
"""

from __future__ import annotations

from tonle.deploy.document import Document, RenderedFile
from tonle.deploy.pod import container, labels, metadata, pod_settings, volumes
from tonle.deploy.workload import PORT, Workload


def render(workload: Workload) -> list[RenderedFile]:
    documents = [deployment(workload), service(workload), disruption_budget(workload), network_policy(workload)]
    return [RenderedFile("kubernetes.yaml", documents, workload.resources.reason)]


def deployment(workload: Workload) -> Document:
    pod = {
        **pod_settings(workload),
        "containers": [container(workload, workload.args(workload.model))],
        "volumes": volumes(workload),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(workload),
        "spec": {
            # no `replicas`: an autoscaler's number must not be overwritten by the next `kubectl apply`
            "selector": {"matchLabels": labels(workload)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": labels(workload)}, "spec": pod},
        },
    }


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


def disruption_budget(workload: Workload) -> Document:
    """A drained node takes one replica at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(workload),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(workload)}},
    }


def network_policy(workload: Workload) -> Document:
    """Callers reach the API's port and nothing else; the pod reaches names and HTTPS, to fetch its model."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(workload),
        "spec": {
            "podSelector": {"matchLabels": labels(workload)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [{"port": PORT, "protocol": "TCP"}]}],
            "egress": [
                {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
                {"ports": [{"port": 443, "protocol": "TCP"}]},
            ],
        },
    }
