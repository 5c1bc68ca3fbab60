"""Settings that cannot work are refused with the reason and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.matrix import workload_of
from tonle.config.load_settings import load_deploy
from tonle.deploy.render import KINDS, render
from tonle.deploy.workload import Workload
from tonle.errors import ConfigError

GPU = {"engine": "vllm", "gpu": "A10G"}
M7 = {"model": "org/some-7B"}
SHORT = {"max_model_len": 4096}


@pytest.mark.parametrize(
    ("serve", "deploy", "words"),
    [
        # sizes
        ({"model": "org/some-70B"}, GPU, ["does not fit", "130.4 GiB of weights", "one A10G", "more gpus"]),
        ({"model": "org/some-13B"}, {"gpu": "A10G"}, ["does not fit", "13B parameters, by its name", "a GPU with more memory"]),
        (M7 | {"max_model_len": 100_000}, GPU, ["does not fit", "100,000 tokens", "max_model_len", "kv_cache_dtype: fp8"]),
        (M7 | {"kv_cache_memory_bytes": 10 * 2**30}, GPU, ["does not fit", "kv_cache_memory"]),
        (M7 | {"max_model_len": 32768}, {}, ["32,768 tokens", "kv_cache_memory"]),
        # 508 MiB in 16 bits would fit, but on a CPU auto may be float32.
        (M7 | SHORT, {}, ["4,096 tokens", "kv_cache_memory"]),
        # 8,192 tokens of 11,520 bytes would fit, but for their scales.
        ({"kv_cache_dtype": "int8", "max_model_len": 8192, "kv_cache_memory_bytes": 90 * 2**20}, {}, ["8,192 tokens"]),
        (M7, {"memory_bytes": 4 * 2**30}, ["memory is 4.0 GiB", "and the server itself take"]),
        (M7, {"memory_limit_bytes": 4 * 2**30}, ["memory_limit is 4.0 GiB"]),
        ({"model": "org/nameless"}, {}, ["the size of org/nameless is not known", "parameters: 7B"]),
        ({"model": "/no/such/folder"}, {}, ["there is no such file", "parameters: 7B"]),
        # GPUs
        (M7, {"gpu": "A10H"}, ["'A10H' is not known; did you mean A10G?", "H100"]),
        (M7 | {"tensor_parallel_size": 4}, {"gpu": "H100", "gpus": 2}, ["contradict each other", "set one of them"]),
        (M7 | {"tensor_parallel_size": 2}, {}, ["divides a model between GPUs", "gpu: H100"]),
        (M7, {"gpus": 2}, ["gpu does not say which"]),
        (M7 | {"device": "cpu"}, {"gpu": "H100"}, ["device: cpu does not go with gpu: H100"]),
        (M7 | {"device": "cuda"}, {}, ["device: cuda needs a GPU"]),
        ({"kv_cache_dtype": "fp8"}, {}, ["fp8 needs a GPU"]),
        ({"kv_cache_dtype": "int8"}, {"gpu": "L4"}, ["int8 is for CPUs", "set fp8"]),
        (M7 | SHORT | {"kv_cache_dtype": "int8"}, {"engine": "vllm"}, ["int8 is of our engine alone"]),
        ({"kv_cache_dtype": "float32"}, {"gpu": "L4"}, ["float32 on a GPU needs dtype: float32"]),
        (M7 | SHORT | {"kv_cache_dtype": "float32"}, {"engine": "vllm"}, ["float32 is of our engine alone"]),
        (M7 | SHORT | {"kv_cache_dtype": "float32"}, GPU, ["float32 is of our engine alone"]),
        ({"kv_cache_dtype": "int8", "dtype": "bfloat16"}, {}, ["int8 on a CPU needs a model computed in float32"]),
        ({"kv_cache_dtype": "float32", "dtype": "float16"}, {}, ["float32 on a CPU needs", "leave kv_cache_dtype auto"]),
        (M7 | {"dtype": "float32", "max_model_len": 16384}, {"gpu": "A10G"}, ["does not fit"]),
        ({"kv_cache_dtype": "fp8"}, {"gpu": "T4"}, ["compute capability 8.0", "T4 is older"]),
        # secrets and files of this machine
        ({"api_key": ("sk-1",)}, {}, ["api_key cannot go into a container", "deploy.api_key_secret"]),
        ({"admin_key": ("sk-1",)}, {}, ["admin_key cannot go"]),
        ({"ssl_keyfile_password": "x"}, {}, ["TLS ends at"]),
        ({"cache": "redis://:pw@redis:6379/0"}, {}, ["cache has a password"]),
        ({"audit_dir": "trail"}, {}, ["audit_dir cannot go", "tonle gateway"]),
        ({"chat_template": "chat.jinja"}, {}, ["chat_template.jinja"]),
        ({"generation_config": "/models/defaults"}, {}, ["override_generation_config"]),
        ({"state_db": "keys.db"}, {}, ["tonle gateway"]),
        # settings against each other
        ({}, {"min_replicas": 5, "max_replicas": 4}, ["min_replicas (5) is more than max_replicas (4)"]),
        ({}, {"prefill_replicas": 11}, ["prefill_replicas (11) is more than max_prefill_replicas (10)"]),
        ({}, {"memory_bytes": 2**35, "memory_limit_bytes": 2**34}, ["memory (32GiB) is more than memory_limit (16GiB)"]),
        ({}, {"cpu": 8, "cpu_limit": 4}, ["cpu (8) is more than cpu_limit (4)"]),
        ({}, {"allowed_namespaces": ("My Team",)}, ["allowed_namespaces: each must be lower-case", "'My Team'"]),
        ({}, {"engine": "vllm"}, ["engine: vllm needs a model"]),
        (M7, {"engine": "vllm"}, ["on a CPU needs max_model_len", "max_model_len: 4096"]),
        (M7 | SHORT | {"activation_bits": 16}, {"engine": "vllm"}, ["activation_bits", "vLLM does not have"]),
        ({"frontends": 2}, {"api_key_secret": "keys"}, ["frontends: 1", "tonle gateway"]),
    ],
)  # fmt: skip
def test_what_no_platform_can_run(serve: dict[str, Any], deploy: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        workload_of(serve, deploy)
    for word in words:
        assert word in refusal.value.message
    for secret in ("sk-1", ":pw@"):
        assert secret not in refusal.value.message


@pytest.mark.parametrize(
    ("kinds", "serve", "deploy", "words"),
    [
        (["kubernetes", "kserve", "llmisvc", "llm-d"], {"model": "./mine"}, {"parameters": "1B"},
         ["./mine is on this machine", "storage_uri"]),
        (["kubernetes", "llm-d"], {}, {"storage_uri": "s3://bucket/some-1B"}, ["cannot be read", "pvc://", "render kserve"]),
        (["kubernetes", "llm-d"], {}, {"storage_uri": "hf://org/some-1B:abc"}, ["without a revision", "render kserve"]),
        (["kubernetes", "keda", "kserve", "llmisvc", "llm-d"], {}, {"min_replicas": 0}, ["min_replicas: 1"]),
        (["kubernetes", "keda", "kserve"], {}, {"api_key_secret": "keys"}, ["/metrics needs the key", "pod_monitor"]),
        (["llmisvc", "llm-d"], {}, {"api_key_secret": "keys"}, ["without a key", "tonle gateway"]),
        (["llmisvc", "llm-d", "keda"], {}, {"prefill_replicas": 1}, ["are for vLLM", "--role prefill", "engine: vllm"]),
        (["llmisvc", "llm-d", "keda"], M7 | SHORT, {"engine": "vllm", "prefill_replicas": 1}, ["needs a GPU"]),
        (["kubernetes", "kserve"], M7, GPU | {"prefill_replicas": 1}, ["llmisvc", "llm-d"]),
        (["kserve", "llmisvc"], {}, {"autoscaler": "hpa"}, ["autoscaler: keda"]),
        (["kubernetes"], {}, {"discovered_by": "tonle"}, ["NAMESPACE/tonle"]),
        (["keda"], {}, {"autoscaler": "hpa"}, ["work against each other"]),
    ],
)  # fmt: skip
def test_what_a_platform_cannot_run(
    kinds: list[str], serve: dict[str, Any], deploy: dict[str, Any], words: list[str]
) -> None:
    workload = workload_of(serve, deploy)
    for kind in kinds:
        with pytest.raises(ConfigError) as refusal:
            render(kind, workload)
        for word in words:
            assert word in refusal.value.message, kind


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("deploy: {min_replica: 1}", ["unknown setting 'min_replica'", "min_replicas"]),
        ("deploy: {name: Lean RAG}", ["name must be lower-case letters", "at most 31"]),
        ("deploy: {name: " + "a" * 32 + "}", ["at most 31"]),
        ("deploy: {storage_uri: models/mine}", ["storage_uri must be a URI such as hf://"]),
        ("deploy: {requests_per_second: 0}", ["must be a number such as 4 or 0.5"]),
        ("deploy: {scale_on: latency}", ["must be one of requests, queue"]),
        ("deploy: 3", ["deploy must hold settings"]),
        ("max_model_length: 3", ["unknown setting 'max_model_length'"]),
    ],
)
def test_what_a_file_cannot_say(text: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "tonle.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        Workload.of(*load_deploy({}, file=file))
    for word in words:
        assert word in refusal.value.message


def test_every_kind_has_a_module_and_a_line() -> None:
    for kind, what in KINDS.items():
        assert what.endswith("."), kind
        __import__(f"tonle.deploy.{kind.replace('-', '_')}")
