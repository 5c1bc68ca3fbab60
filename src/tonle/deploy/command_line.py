"""The command line of a server in a container, from its settings: ours, or vLLM's with the same meaning.

Does: flags for what the settings file changes. Does not: write secrets, or settings that name files of this machine: those
are refused with what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tonle.config.serve import SETTINGS, ServeConfig
from tonle.errors import ConfigError

# Set by the platform's documents, not by the file: where a pod listens and what it serves is theirs to know.
_OF_THE_PLATFORM = ("model", "served_model_name", "host", "port", "cache_dir")
_NOT_IN_A_POD = {
    "api_key": "a key must not be written into a document; put it into a Secret and name that: deploy.api_key_secret",
    "admin_key": "a key must not be written into a document; run `tonle gateway` for administration",
    "ssl_certfile": "TLS ends at the platform's gateway or ingress",
    "ssl_keyfile": "TLS ends at the platform's gateway or ingress",
    "ssl_keyfile_password": "TLS ends at the platform's gateway or ingress",
    "ssl_ca_certs": "TLS ends at the platform's gateway or ingress",
    "chat_template": "it is a file of this machine; put it into the model's folder as chat_template.jinja",
    "audit_dir": "each replica would write a trail of its own to a disk that goes with the pod; record requests in "
    "`tonle gateway`, which stands in front of the replicas",
    "state_db": "keys and limits of several replicas are the work of `tonle gateway`",
}
_VLLM_FLAGS = {  # ours: vLLM's, where vLLM has the setting
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_model_len": "--max-model-len",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "block_size": "--block-size",
    "dtype": "--dtype",
    "generation_config": "--generation-config",
    "override_generation_config": "--override-generation-config",
    "kv_cache_memory": "--kv-cache-memory-bytes",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "load_format": "--load-format",
}
_VLLM_SWITCHES = {"prefix_caching": ("--enable-prefix-caching", "--no-enable-prefix-caching")}
_VLLM_IGNORED = ("log_level", "log_json", "drain", "device")  # have another form there, or none


def tonle_flags(serve: ServeConfig) -> list[str]:
    """Flags of `tonle serve`, without those of the platform."""
    flags = []
    for name, value in _changed(serve):
        setting = SETTINGS[name]
        if isinstance(value, bool):
            flags.append(setting.flag if value else f"--no-{setting.flag[2:]}")
        elif isinstance(value, tuple):
            flags += [f"{setting.flag}={part}" for part in value]
        else:
            flags.append(f"{setting.flag}={setting.type.show(value)}")
    return flags


def vllm_flags(serve: ServeConfig, *, gpus: int) -> list[str]:
    """Flags of `vllm serve`. Raises `ConfigError` for a setting that vLLM does not have."""
    flags = [f"--tensor-parallel-size={gpus}"] if gpus > 1 else []
    for name, value in _changed(serve):
        if name in _VLLM_SWITCHES:
            flags.append(_VLLM_SWITCHES[name][not value])
        elif name in _VLLM_FLAGS:
            shown = value if name == "kv_cache_memory" else SETTINGS[name].type.show(value)
            flags.append(f"{_VLLM_FLAGS[name]}={shown}")
        elif name not in _VLLM_IGNORED:
            raise ConfigError(
                f"{name} is a setting of our engine that vLLM does not have; remove it, or set engine: tonle",
                param=name,
            )
    return flags


def _changed(serve: ServeConfig) -> Iterator[tuple[str, Any]]:
    """By public name, what is not at its default."""
    for name, setting in SETTINGS.items():
        value = getattr(serve, setting.field)
        if value == setting.default:
            continue
        if name in _NOT_IN_A_POD:
            raise ConfigError(f"{name} cannot go into a container: {_NOT_IN_A_POD[name]}", param=name)
        if name not in _OF_THE_PLATFORM:
            yield name, value
