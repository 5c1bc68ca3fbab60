"""`render`: from the name of a platform to its files.

Does: find the module of a kind. Does not: import the others, or write to disk (`cli/deploy.py`).
"""

from __future__ import annotations

from importlib import import_module

from tonle.deploy.document import RenderedFile
from tonle.deploy.workload import Workload

# What `tonle deploy render` can write: the kind, and what it is for; from the smallest to the largest, as docs/deploy.md goes
# through them. Its module has the same name, with _ for -.
KINDS = {
    "compose": "Docker Compose on one machine: server, gateway with keys and audit trail, Prometheus, Grafana.",
    "systemd": "A hardened unit for one machine, without containers.",
    "runpod": "Network volume, pod template, serverless endpoints, and a script that creates them.",
    "kubernetes": "Deployment, Service, disruption budget, network policy; needs no operator.",
    "keda": "Replicas by request rate or queue, for the Deployments of kubernetes or llm-d.",
    "kserve": "KServe's ServingRuntime and InferenceService.",
    "llmisvc": "KServe's LLMInferenceService: routing by llm-d, prefill and decode in separate pods if wanted.",
    "llm-d": "The same without KServe: InferencePool, endpoint picker, model servers.",
}


def render(kind: str, workload: Workload) -> list[RenderedFile]:
    """Raises `ConfigError` if the settings cannot work on that platform."""
    files: list[RenderedFile] = import_module(f"tonle.deploy.{kind.replace('-', '_')}").render(workload)
    return files
