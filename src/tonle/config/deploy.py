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

# A DNS label, with room for what platforms append: Kubernetes cuts names of pods after 58 characters, and autoscalers tell
# pods apart by their names (NAME-kserve-prefill-1234567890-).
MAX_NAME = 31
_NAME = values.pattern(
    rf"[a-z]([-a-z0-9]{{0,{MAX_NAME - 2}}}[a-z0-9])?",
    f"lower-case letters, digits and hyphens, beginning with a letter, at most {MAX_NAME}",
)
_SECRET = values.pattern(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", "the name of a Secret")
_LABEL = values.pattern(
    r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "lower-case letters, digits and hyphens, at most 63, as in a DNS label"
)


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
        None,
        values.optional(_LABEL, none="that of kubectl"),
        "Kubernetes namespace written into the documents. The documents of llm-d always name one: default, unless set.",
    )
    storage_uri: str | None = _place(
        None,
        values.optional(
            values.pattern(r"(hf|pvc|s3|gs|oci|https?)://[^/\s]+.*", "a URI such as hf://org/name or pvc://claim/path"),
            none="hf://MODEL for a hub name",
        ),
        "Where the platform finds the model: hf://org/name or pvc://claim/path; with KServe also s3://, gs://, oci://, "
        "https://.",
    )
    model_cache_bytes: int | None = _place(
        None,
        values.optional(values.size(), none="what the model needs, and 10GiB"),
        "Size of each pod's volume for downloaded models and compiled kernels.",
    )
    gateway: str = _place(
        "inference-gateway",
        values.pattern(r"([a-z0-9][-a-z0-9]{0,62}/)?[a-z0-9][-a-z0-9.]{0,62}", "NAME or NAMESPACE/NAME"),
        "With llm-d: the Gateway that callers reach, as NAME or NAMESPACE/NAME.",
    )
    allowed_namespaces: tuple[str, ...] = _place(
        (),
        values.names("NAMESPACE"),
        "Namespaces whose pods may call the server besides its own, such as those of the gateway and of Prometheus. Repeat the "
        "flag for more. By default all.",
    )

    discovered_by: str | None = _place(
        None,
        values.optional(
            values.pattern(r"([a-z0-9][-a-z0-9]{0,62}/)?[a-z0-9][-a-z0-9.]{0,62}", "NAME or NAMESPACE/NAME"),
            none="none",
        ),
        "With plain Kubernetes: the service account of a `tonle gateway` that finds the pods of this service (--discovery); it "
        "gets the rights for that.",
    )

    data_center: str = _place(
        "EU-RO-1",
        values.text("ID"),
        "With RunPod: data center of the network volume, and so of everything that uses it.",
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
        "GPU of each pod, such as A10G, L4, A100-80GB or H100.",
    )
    gpus: int = _pod(
        1,
        values.integer(1, 16),
        "GPUs of each pod, if gpu is set, which compute the model together: --tensor-parallel-size.",
    )
    cpu: int | None = _pod(
        None,
        values.optional(values.integer(1, 1024), none="4 with a GPU, else 2"),
        "CPU request of each pod, in cores.",
    )
    cpu_limit: int | None = _pod(
        None, values.optional(values.integer(1, 1024), none="no limit"), "CPU limit of each pod, in cores."
    )
    memory_bytes: int | None = _pod(
        None, values.optional(values.size(), none="what the model needs"), "Memory request of each pod."
    )
    memory_limit_bytes: int | None = _pod(
        None,
        values.optional(values.size(), none="the same as memory"),
        "Memory limit of each pod; one that takes more is killed.",
    )
    parameters: str | None = _pod(
        None,
        values.optional(
            values.pattern(r"[0-9]+(\.[0-9]+)?[MB]", "a number such as 7B or 135M"), none="from its name or its files"
        ),
        "Parameters of the model, such as 7B or 135M: weights and KV cache are estimated from it.",
    )
    pod_monitor: bool = _pod(
        False,
        values.boolean(),
        "Have the Prometheus operator read the metrics (PodMonitor). If off, pods carry the annotations that a Prometheus "
        "without it follows.",
    )
    spread: bool = _pod(True, values.boolean(), "Prefer nodes that run no other replica.")

    min_replicas: int = _scaling(1, values.integer(0, 10_000), "Fewest replicas.")
    max_replicas: int = _scaling(10, values.integer(1, 10_000), "Most replicas.")
    scale_on: str = _scaling(
        "requests",
        values.choice("requests", "queue"),
        "requests: add replicas by finished requests per second and by waiting requests; queue: by waiting requests alone.",
    )
    requests_per_second: float = _scaling(
        4.0,
        values.number(),
        "With scale_on requests: finished requests per second and replica above which one is added; set it below what "
        "one replica can do, as `tonle bench` measures it.",
    )
    waiting_requests: int = _scaling(5, values.integer(1), "Waiting requests per replica above which one is added.")
    autoscaler: str = _scaling(
        "keda",
        values.choice("keda", "hpa", "none"),
        "What adds replicas: keda, hpa (a HorizontalPodAutoscaler, with prometheus-adapter), or none (always "
        "min_replicas). KServe's kinds know keda and none.",
    )
    prefill_replicas: int = _scaling(
        0,
        values.integer(0, 10_000),
        "With llm-d and llmisvc: fewest replicas that do prefill only; 0 = none, every replica does prefill and decode.",
    )
    max_prefill_replicas: int = _scaling(10, values.integer(1, 10_000), "Most replicas that do prefill only.")
    prometheus_url: str = _scaling(
        "http://prometheus.monitoring:9090",
        values.pattern(r"https?://[^/\s]+.*", "a URL such as http://prometheus.monitoring:9090"),
        "Prometheus that autoscalers query.",
    )

    api_key_secret: str | None = _secret(
        None,
        values.optional(_SECRET, none="no key is asked for"),
        "Secret with the key that callers must send, in its entry api-key. A key itself is never written into a document.",
    )
    hub_token_secret: str | None = _secret(
        None,
        values.optional(_SECRET, none="none"),
        "Secret with the token that fetches the model from the hub, in its entry HF_TOKEN.",
    )

    def validate(self) -> None:
        """Check settings against each other. Raises `ConfigError`."""
        for low, high in _PAIRS:
            least, most = getattr(self, low.field), getattr(self, high.field)
            if least is not None and most is not None and least > most:
                shown = low.type.show(least), high.type.show(most)
                raise ConfigError(
                    f"{low.name} ({shown[0]}) is more than {high.name} ({shown[1]}); raise {high.name}", param=low.name
                )
        for name in self.allowed_namespaces:
            try:
                _LABEL.read(name)
            except ValueError as error:
                raise ConfigError(f"allowed_namespaces: each {error}", param="allowed_namespaces") from None
        if self.gpus > 1 and self.gpu is None:
            raise ConfigError(
                f"gpus is {self.gpus}, but gpu does not say which; set gpu, for example gpu: A10G", param="gpu"
            )


DEPLOY_SETTINGS: dict[str, Setting] = settings_of(DeployConfig)
_PAIRS = [
    (DEPLOY_SETTINGS[low], DEPLOY_SETTINGS[high])
    for low, high in (
        ("min_replicas", "max_replicas"),
        ("prefill_replicas", "max_prefill_replicas"),
        ("cpu", "cpu_limit"),
        ("memory", "memory_limit"),
    )
]
