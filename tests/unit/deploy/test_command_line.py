"""The command line in a container says what the settings said: read back by our own parser, and in vLLM's words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.unit.cli.test_flags import ALL, SWITCHES
from tests.unit.deploy.matrix import workload_of
from tonle.cli.flags import SERVE_FLAGS, with_flags
from tonle.config.load_settings import load
from tonle.config.serve import SETTINGS, ServeConfig
from tonle.config.workers import WorkerConfig
from tonle.deploy.command_line import _NOT_IN_A_POD, _OF_THE_PLATFORM, tonle_flags, vllm_flags
from tonle.errors import ConfigError


def read_back(args: list[str]) -> ServeConfig:
    received: dict[str, Any] = {}

    @with_flags(*SERVE_FLAGS)
    def verb(model: str | None = typer.Argument(None), *, flags: dict[str, Any]) -> None:
        received.update(flags)

    app = typer.Typer()
    app.command()(verb)
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    return load(received, environ={})


def test_every_setting_arrives() -> None:
    wanted = {}
    for name, text in (ALL | {"audit_retention_days": "30"}).items():
        if name not in _NOT_IN_A_POD and name not in _OF_THE_PLATFORM and name != "device":
            wanted[SETTINGS[name].field] = SETTINGS[name].type.read(text)
    for name, flag in SWITCHES.items():
        wanted[name] = not flag.startswith("--no-")
    wanted |= {
        "generation_config": "none",
        "cache": "redis://cache:6379/0",
        "cache_max_size": None,
        "cache_max_bytes": None,
    }
    config = replace(ServeConfig(), **wanted)
    assert len(tonle_flags(config)) > 30
    assert read_back(tonle_flags(config)) == config


def test_settings_of_a_pool_arrive() -> None:
    pools = (
        WorkerConfig(kind="asr", instances=2, options={"language": "en"}),
        WorkerConfig(kind="tts", model="/voices/km", idle_unload="10m"),
        WorkerConfig(kind="embeddings"),
    )
    config = replace(ServeConfig(), workers=pools)
    assert read_back(tonle_flags(config)) == config


def test_defaults_need_no_flags() -> None:
    assert tonle_flags(ServeConfig()) == []
    assert workload_of().args(None) == ["--host=0.0.0.0", "--port=8000"]


def test_where_and_what_is_the_platforms() -> None:
    workload = workload_of({"host": "127.0.0.1", "port": 9, "served_model_name": ("a", "b"), "cache_dir": "/somewhere"})
    assert workload.args("/mnt/models", port=8080, served_name="n") == [
        "/mnt/models", "--host=0.0.0.0", "--port=8080", "--served-model-name=n,a,b",
    ]  # fmt: skip
    assert read_back(workload.args(None, served_name="a")).served_model_name == ("a", "b")


def test_vllm_is_told_the_same() -> None:
    config = replace(
        ServeConfig(), max_num_seqs=8, max_model_len=4096, kv_cache_memory_bytes=2**30, kv_cache_dtype="fp8", block_size=32,
        dtype="bfloat16", generation_config="none", override_generation_config={"temperature": 0.5}, load_format="random",
        prefix_caching=False, frontends=2, drain_s=12.5, gpu_memory_utilization=0.8, log_level="DEBUG", log_json=True,
        cors_origins=("https://a.example",), long_prefill_token_threshold=7, max_num_batched_tokens=512,
    )  # fmt: skip
    assert set(vllm_flags(config, gpus=2)) == {
        "--max-num-seqs=8", "--max-model-len=4096", "--kv-cache-memory-bytes=1073741824", "--kv-cache-dtype=fp8",
        "--block-size=32", "--dtype=bfloat16", "--generation-config=vllm", "--load-format=dummy",
        '--override-generation-config={"temperature": 0.5}', "--no-enable-prefix-caching", "--api-server-count=2",
        "--shutdown-timeout=13", "--gpu-memory-utilization=0.8", "--tensor-parallel-size=2",
        '--allowed-origins=["https://a.example"]', "--long-prefill-token-threshold=7", "--max-num-batched-tokens=512",
    }  # fmt: skip


def test_vllm_behaves_as_ours_where_its_defaults_differ() -> None:
    assert vllm_flags(ServeConfig(), gpus=1) == [
        "--max-model-len=auto", "--shutdown-timeout=30", "--gpu-memory-utilization=0.9",
    ]  # fmt: skip
    on_cpu = workload_of(
        {"model": "org/some-1B", "kv_cache_memory_bytes": 3 * 2**30 // 2, "max_model_len": 4096}, {"engine": "vllm"}
    )
    assert "--kv-cache-memory" not in " ".join(on_cpu.flags())
    assert on_cpu.environment()["VLLM_CPU_KVCACHE_SPACE"] == "2"


@pytest.mark.parametrize("engine", ["tonle", "vllm"])
@pytest.mark.parametrize(
    ("serve", "deploy"),
    [({"tensor_parallel_size": 4}, {}), ({}, {"gpus": 4}), ({"tensor_parallel_size": 4}, {"gpus": 4})],
)
def test_a_pod_has_as_many_gpus_as_its_server_uses(engine: str, serve: dict[str, Any], deploy: dict[str, Any]) -> None:
    workload = workload_of({"model": "org/some-70B", **serve}, {"engine": engine, "gpu": "H100", **deploy})
    assert workload.resources.gpus == 4
    assert workload.flags().count("--tensor-parallel-size=4") == 1


def test_adapters_for_vllm_are_one_list() -> None:
    config = replace(ServeConfig(), lora=(("a", "/x"), ("b", "/y")), max_lora_rank=64)
    flags = vllm_flags(config, gpus=1)
    assert flags[3:] == ["--enable-lora", "--max-loras=8", "--lora-modules", "a=/x", "b=/y", "--max-lora-rank=64"]
    assert vllm_flags(replace(ServeConfig(), enable_lora=True, max_loras=2), gpus=1)[3:] == [
        "--enable-lora",
        "--max-loras=2",
    ]


def test_names_for_vllm_are_one_list() -> None:
    workload = workload_of({"model": "org/some-1B", "served_model_name": ("a", "b")}, {"engine": "vllm", "gpu": "L4"})
    args = workload.args("org/some-1B", served_name="n")
    assert args[3:7] == ["--served-model-name", "n", "a", "b"] and args[7].startswith("--")


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in (*_NOT_IN_A_POD, *_OF_THE_PLATFORM)])
def test_every_setting_is_translated_refused_or_known_not_to_matter(name: str) -> None:
    setting = SETTINGS[name]
    value = not setting.default if isinstance(setting.default, bool) else setting.type.read(ALL.get(name, "2"))
    if name == "generation_config":
        value = "none"
    config = replace(ServeConfig(), **{setting.field: value})
    try:
        flags = vllm_flags(config, gpus=1)
    except ConfigError as refusal:
        assert refusal.param == name
    else:
        assert flags != vllm_flags(ServeConfig(), gpus=1) or name in (
            "log_level",
            "log_json",
            "device",
            "tensor_parallel_size",
        )


def test_names_of_services() -> None:
    named = {
        "Qwen/Qwen2.5-7B-Instruct": "qwen2-5-7b-instruct", "org/7B": "model-7b",
        "org/meta-llama-3.1-70B-instruct-awq-int4-long": "meta-llama-3-1-70b-instruct-awq",
    }  # fmt: skip
    for model, name in named.items():
        assert workload_of({"model": model}, {"gpu": "B200"}).name == name
    assert workload_of().name == "smollm2-135m-instruct"
    assert workload_of({}, {"storage_uri": "pvc://models/rag/some-7B/"}).name == "some-7b"
    hub = workload_of({}, {"storage_uri": "hf://org/some-7B:abc"})
    assert (hub.model_name, hub.storage_uri) == ("org/some-7B", "hf://org/some-7B:abc")
