"""Disaggregated serving, prefill and decode in separate pods: which Deployments there are, and what vLLM is told.

Does: names, replicas, vLLM's connector. Does not: route between them (`endpoint_picker.py`).
"""

from __future__ import annotations

import json

from tonle.deploy.autoscaling import Scaled
from tonle.deploy.document import Document
from tonle.deploy.workload import Workload
from tonle.errors import ConfigError

# Where a pod tells the others how to fetch its KV cache.
SIDE_CHANNEL: tuple[Document, ...] = (
    {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
)
_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
KV_TRANSFER = f"--kv-transfer-config={json.dumps(_TRANSFER, separators=(',', ':'))}"


def is_disaggregated(workload: Workload) -> bool:
    """Raises `ConfigError` if it is asked for and cannot be."""
    if not workload.deploy.prefill_replicas:
        return False
    if workload.is_ours:
        raise ConfigError(
            "prefill_replicas: these documents are for vLLM; set engine: vllm, or prefill_replicas: 0. With our engine, run "
            "servers with --role prefill and --role decode behind `tonle gateway` (docs/scale.md)",
            param="prefill_replicas",
        )
    if not workload.resources.gpus:
        raise ConfigError(
            "prefill_replicas needs a GPU: KV cache goes from one GPU's memory to another's; set gpu", param="gpu"
        )
    return True


def scaled_deployments(
    workload: Workload, *, prefill: str = "-prefill", decode: str = "-decode", both: str = ""
) -> list[Scaled]:
    """The Deployments, by what a platform appends to the name of the service."""
    deploy, name = workload.deploy, workload.name
    if not is_disaggregated(workload):
        return [Scaled(name + both, deploy.min_replicas, deploy.max_replicas)]
    return [
        Scaled(name + prefill, deploy.prefill_replicas, deploy.max_prefill_replicas),
        Scaled(name + decode, deploy.min_replicas, deploy.max_replicas),
    ]
