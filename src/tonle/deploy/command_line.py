"""The command line of a server in a container, from its settings: ours, or vLLM's with the same meaning.

Does: flags for what the settings file changes. Does not: write secrets, or settings that name files of this machine: those
are refused with what to do instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from tonle.config.serve import SETTINGS, ServeConfig
from tonle.errors import ConfigError

# Set by the platform's documents, not by the file: where a pod listens and what it serves is theirs to know.
_OF_THE_PLATFORM = ("model", "served_model_name", "host", "port", "cache_dir")
_TLS = "TLS ends at the platform's gateway or ingress"
_AUDIT = (
    "each replica would write a trail of its own to a disk that goes with the pod; record requests in `tonle gateway`, in "
    "front of the replicas"
)
_ALERTS = "addresses and secrets must not be written into a document; let `tonle gateway`, in front of the replicas, raise alerts"
_NOT_IN_A_POD = {
    "api_key": "a key must not be written into a document; put it into a Secret and name that: deploy.api_key_secret",
    "admin_key": "a key must not be written into a document; run `tonle gateway` for administration",
    "ssl_certfile": _TLS,
    "ssl_keyfile": _TLS,
    "ssl_keyfile_password": _TLS,
    "ssl_ca_certs": _TLS,
    "ssl_cert_reqs": _TLS,
    "chat_template": "it is a file of this machine; put it into the model's folder as chat_template.jinja",
    "audit_dir": _AUDIT,
    "audit_key_file": _AUDIT,
    "audit_anchor": _AUDIT,
    "alert_webhook": _ALERTS,
    "alert_secret": _ALERTS,
    "state_db": "keys and limits of several replicas are the work of `tonle gateway`",
}
_VLLM_FLAGS = {  # ours: vLLM's, where vLLM has the setting
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "kv_cache_dtype": "--kv-cache-dtype",
    "block_size": "--block-size",
    "dtype": "--dtype",
    "generation_config": "--generation-config",
    "override_generation_config": "--override-generation-config",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "load_format": "--load-format",
    "frontends": "--api-server-count",
    "kv_events_config": "--kv-events-config",
    "max_loras": "--max-loras",
    "max_lora_rank": "--max-lora-rank",
    "max_cpu_loras": "--max-cpu-loras",
}
_VLLM_WORDS = {("generation_config", "none"): "vllm", ("load_format", "random"): "dummy"}  # for the same thing
# Written below, or into the environment (`workload.py`), or without a counterpart that could change an answer.
_VLLM_ELSEWHERE = (
    "max_model_len", "gpu_memory_utilization", "kv_cache_memory", "drain", "log_level", "log_json", "device", "prefix_caching",
    "cors_origins", "lora", "enable_lora", "tensor_parallel_size", "kv_offload_memory",
)  # fmt: skip


def tonle_flags(serve: ServeConfig) -> list[str]:
    """Flags of `tonle serve`, without those of the platform."""
    flags = []
    for name, value in _changed(serve):
        setting = SETTINGS[name]
        if isinstance(value, bool):
            flags.append(setting.flag if value else f"--no-{setting.flag[2:]}")
        elif isinstance(value, tuple):
            flags += [f"{setting.flag}={'='.join(part) if isinstance(part, tuple) else part}" for part in value]
        else:
            flags.append(f"{setting.flag}={setting.type.show(value)}")
    return flags


def vllm_flags(serve: ServeConfig, *, gpus: int) -> list[str]:
    """Flags of `vllm serve`. Raises `ConfigError` for a setting that vLLM does not have."""
    # As ours do unless told: the longest context that fits, and running requests finish before a server stops.
    flags = [f"--max-model-len={serve.max_model_len or 'auto'}", f"--shutdown-timeout={math.ceil(serve.drain_s)}"]
    if gpus:
        flags.append(f"--gpu-memory-utilization={serve.gpu_memory_utilization:g}")
        if serve.kv_cache_memory_bytes is not None:  # on a CPU it is a variable
            flags.append(f"--kv-cache-memory-bytes={serve.kv_cache_memory_bytes}")
    if serve.kv_offload_memory_bytes:
        flags.append(f"--kv-offloading-size={serve.kv_offload_memory_bytes / 2**30:g}")
    if gpus > 1:
        flags.append(f"--tensor-parallel-size={gpus}")
    if not serve.prefix_caching:
        flags.append("--no-enable-prefix-caching")
    if serve.cors_origins:
        flags.append(f"--allowed-origins={json.dumps(serve.cors_origins)}")
    flags += _vllm_adapters(serve)
    for name, value in _changed(serve):
        if name in _VLLM_FLAGS:
            shown = _VLLM_WORDS.get((name, str(value))) or SETTINGS[name].type.show(value)
            flags.append(f"{_VLLM_FLAGS[name]}={shown}")
        elif name not in _VLLM_ELSEWHERE:
            raise ConfigError(
                f"{name} is a setting of `tonle serve` that vLLM does not have; remove it, or set engine: tonle",
                param=name,
            )
    return flags


def _vllm_adapters(serve: ServeConfig) -> list[str]:
    if not serve.lora and not serve.enable_lora:
        return []
    flags = ["--enable-lora"]
    if serve.max_loras == SETTINGS["max_loras"].default:  # vLLM's is 1
        flags.append(f"--max-loras={serve.max_loras}")
    modules = [f"{name}={path}" for name, path in serve.lora]
    return [*flags, "--lora-modules", *modules] if modules else flags


def _changed(serve: ServeConfig) -> Iterator[tuple[str, Any]]:
    """By public name, what is not at its default."""
    for name, setting in SETTINGS.items():
        value = getattr(serve, setting.field)
        if value == setting.default:
            continue
        if name in _NOT_IN_A_POD:
            raise ConfigError(f"{name} cannot go into a container: {_NOT_IN_A_POD[name]}", param=name)
        if name == "generation_config" and value not in ("auto", "none"):
            raise ConfigError(
                "generation_config names a folder of this machine; put generation_config.json into the model's folder, or use "
                "override_generation_config",
                param=name,
            )
        if name in ("cache", "kv_offload_redis") and "@" in str(value):
            instead = ", or set the cache in `tonle gateway`" if name == "cache" else ""
            raise ConfigError(
                f"{name} has a password in it, which must not be written into a document; leave it out of the URL and let a "
                f"NetworkPolicy guard that Redis{instead}",
                param=name,
            )
        if name not in _OF_THE_PLATFORM:
            yield name, value
