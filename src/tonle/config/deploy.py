"""`DeployConfig`: where and how a server is to run; the `deploy:` section of a settings file, and flags of `tonle deploy render`.

Does: hold defaults and help, check settings against each other. Does not: know any platform's documents (`tonle.deploy`), or
hold settings of the server itself: those stand beside the section, as `tonle serve --config` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tonle.config import values
from tonle.config.setting import PLACE, POD, SCALING, SECRETS, Setting, setting, settings_of
from tonle.config.values import ValueType
from tonle.errors import ConfigError

_LABEL = r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?"  # a DNS label, with room for what platforms append
_NAME = values.pattern(_LABEL, "lower-case letters, digits and hyphens, beginning with a letter, at most 53")


def _place(default: Any, type: ValueType, help: str) -> Any:
    return setting(PLACE, default, type, help)


def _pod(default: Any, type: ValueType, help: str) -> Any:
    return setting(POD, default, type, help)


def _scaling(default: Any, type: ValueType, help: str) -> Any:
    return setting(SCALING, default, type, help)


def _secret(default: Any, type: ValueType, help: str) -> Any:
    return setting(SECRETS, default, type, help)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """Settings of `tonle deploy render`."""

    name: str | None = _place(
        None,
        values.optional(_NAME, none="the model's name"),
        "Name of the service and of everything that belongs to it.",
    )
    namespace: str | None = _place(
        None, values.optional(_NAME, none="that of kubectl"), "Kubernetes namespace written into the documents."
    )
    storage_uri: str | None = _place(
        None,
        values.optional(values.text("URI"), none="hf://MODEL for a hub name"),
        "Where the platform finds the model: hf://org/name, pvc://claim/path, s3://bucket/path, gs://, oci://.",
    )
    model_cache: str = _place(
        "20GiB",
        values.pattern(r"[1-9][0-9]*(Mi|Gi|Ti)B?", "a size such as 20GiB"),
        "Size of the volume for downloaded models and compiled kernels, where the platform does not bring the model.",
    )

    data_center: str = _place(
        "EU-RO-1", values.text("ID"), "RunPod's data center of the network volume, and so of what uses it."
    )

    engine: str = _pod("tonle", values.choice("tonle", "vllm"), "tonle, or vllm to run vLLM with the same settings.")
    image: str | None = _pod(
        None,
        values.optional(values.text("IMAGE"), none="tonle:VERSION or vllm/vllm-openai:VERSION"),
        "Container image.",
    )
    gpu: str | None = _pod(
        None,
        values.optional(values.text("GPU"), none="a CPU"),
        "GPU of each pod: T4, L4, A10G, A100-80GB, H100, H200, …",
    )
    gpus: int = _pod(1, values.integer(1, 16), "GPUs of each pod, if it has any; one model is spread over all of them.")
    cpu: int | None = _pod(
        None, values.optional(values.integer(1, 1024), none="4 with a GPU, else 2"), "CPU cores of each pod."
    )
    memory_bytes: int | None = _pod(
        None, values.optional(values.size(), none="what the model needs"), "Memory of each pod."
    )
    parameters: str | None = _pod(
        None,
        values.optional(
            values.pattern(r"[0-9]+(\.[0-9]+)?[MB]", "a number such as 7B or 135M"), none="read from the model"
        ),
        "Parameters of a model that is not on this machine and whose name does not say: 7B, 135M.",
    )
    spread: bool = _pod(True, values.boolean(), "Prefer nodes that have no other replica.")

    min_replicas: int = _scaling(1, values.integer(0, 10_000), "Fewest replicas.")
    max_replicas: int = _scaling(10, values.integer(1, 10_000), "Most replicas.")
    scale_on: str = _scaling(
        "requests",
        values.choice("requests", "queue"),
        "Add replicas by requests per second, or by requests that wait in the engines' queues.",
    )
    requests_per_second: int = _scaling(4, values.integer(1), "With scale_on requests: what one replica should take.")
    waiting_requests: int = _scaling(5, values.integer(1), "With scale_on queue: how many may wait per replica.")
    prefill_replicas: int = _scaling(
        0, values.integer(0, 10_000), "Replicas that only compute prompts, at least; 0 = none, every replica does both."
    )
    max_prefill_replicas: int = _scaling(10, values.integer(1, 10_000), "Most replicas that only compute prompts.")
    prometheus_url: str = _scaling(
        "http://prometheus-operated.monitoring:9090", values.text("URL"), "Prometheus that autoscalers ask."
    )

    api_key_secret: str | None = _secret(
        None,
        values.optional(_NAME, none="no key is asked for"),
        "Secret whose entry api-key callers must send. A key itself is never written into a document.",
    )
    hub_token_secret: str | None = _secret(
        None, values.optional(_NAME, none="none"), "Secret whose entry token fetches the model from the hub."
    )

    def validate(self) -> None:
        """Check settings against each other. Raises `ConfigError`."""
        for low, high in (("min_replicas", "max_replicas"), ("prefill_replicas", "max_prefill_replicas")):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(
                    f"{low} ({getattr(self, low)}) is more than {high} ({getattr(self, high)})", param=low
                )
        if self.gpus > 1 and self.gpu is None:
            raise ConfigError(
                f"gpus is {self.gpus}, but gpu does not say which; set gpu, for example gpu: A10G", param="gpu"
            )


DEPLOY_SETTINGS: dict[str, Setting] = settings_of(DeployConfig)
