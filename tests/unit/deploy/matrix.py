"""Settings that documents are rendered from in tests: kinds × engines × devices × what may be switched on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tonle.config.deploy import DeployConfig
from tonle.config.serve import ServeConfig
from tonle.deploy.document import Document
from tonle.deploy.render import render
from tonle.deploy.workload import Workload

KINDS = ("kubernetes", "keda", "kserve", "llmisvc", "llm-d")
ROUTED = ("llmisvc", "llm-d")  # whose router reads /metrics without a key
LONGEST = "a" * 31

ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "ours-cpu": ({"model": "org/some-0.5B", "max_model_len": 4096, "drain_s": 12.5}, {"name": LONGEST}),
    "ours-gpu": (
        {"model": "org/some-7B", "kv_cache_dtype": "fp8", "served_model_name": ("a", "b")},
        {"gpu": "L4", "hub_token_secret": "hub"},
    ),
    "ours-claim": (
        {"model": "./models/mine"},
        {"storage_uri": "pvc://models/mine", "parameters": "3B", "spread": False},
    ),
    "vllm-cpu": (
        {"model": "org/some-1.5B", "max_model_len": 4096},
        {"engine": "vllm", "image": "registry.example/vllm:1", "name": LONGEST},
    ),
    "vllm-gpu": (
        {"model": "org/some-70B", "served_model_name": ("a", "b"), "override_generation_config": {"temperature": 0.5}},
        {"engine": "vllm", "gpu": "H100", "gpus": 4, "cpu": 8, "cpu_limit": 16, "memory_bytes": 100 * 2**30},
    ),
}
APART = {"engine": "vllm", "gpu": "A10G", "prefill_replicas": 2, "max_prefill_replicas": 3, "name": LONGEST}
SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "namespace": "models", "pod_monitor": True, "allowed_namespaces": ("gateway", "monitoring"),
        "scale_on": "queue", "gateway": "gateways/public", "hub_token_secret": "hub", "min_replicas": 2,
        "requests_per_second": 0.5, "discovered_by": "tonle",
    },
    "no autoscaler": {"autoscaler": "none", "min_replicas": 3},
    "hpa": {"autoscaler": "hpa", "namespace": "models"},
    "keys": {"api_key_secret": "keys", "pod_monitor": True},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    id: str
    kind: str
    workload: Workload

    @property
    def documents(self) -> list[Document]:
        return [document for file in render(self.kind, self.workload) for document in file.documents]


def cases() -> Iterator[Case]:
    """Every combination that can be rendered."""
    engines = [*ENGINES.items(), ("apart", ({"model": "org/some-7B", "kv_cache_dtype": "fp8"}, APART))]
    for engine, (serve, deploy) in engines:
        for switch, more in SWITCHES.items():
            workload = workload_of(serve, {**deploy, **more})
            for kind in KINDS:
                if _goes(kind, workload):
                    yield Case(f"{kind}, {engine}, {switch}", kind, workload)


def _goes(kind: str, workload: Workload) -> bool:
    """What is refused is tested in test_refusals.py."""
    deploy = workload.deploy
    if deploy.prefill_replicas and kind in ("kubernetes", "kserve"):
        return False
    if deploy.autoscaler == "hpa" and kind in ("kserve", "llmisvc", "keda"):
        return False
    if deploy.autoscaler == "none" and kind == "keda":
        return False
    return not (deploy.api_key_secret and workload.is_ours and kind in ROUTED)


def workload_of(serve: dict[str, Any] | None = None, deploy: dict[str, Any] | None = None) -> Workload:
    config = DeployConfig(**(deploy or {}))
    config.validate()
    return Workload.of(replace(ServeConfig(), **(serve or {})), config)


CASES = list(cases())
