"""How large models are taken to be, and what pods ask for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import save_folder
from tests.unit.deploy.matrix import workload_of
from tonle.deploy.gpus import GPUS, find_gpu
from tonle.deploy.model_size import model_size
from tonle.deploy.pod import resources
from tonle.deploy.units import quantity
from tonle.errors import ConfigError
from tonle.models.inputs import KVCache
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource

GIB = 1024**3


@pytest.mark.parametrize(
    ("model", "billions", "bytes_each"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.5, 2), ("meta-llama/Llama-3.1-8B-Instruct", 8, 2),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", 0.36, 2), ("Qwen/Qwen3-30B-A3B", 30, 2),
        ("org/Llama-3.3-70B-Instruct-AWQ", 70, 0.6), ("org/Qwen2.5-7B-Instruct-GPTQ-Int4", 7, 0.6),
        ("org/Llama-3.1-70B-Instruct-FP8", 70, 1.05), ("org/some-7B-w8a8", 7, 1.05),
        ("org/bnbank-7B", 7, 2),
    ],
)  # fmt: skip
def test_by_its_name(model: str, billions: float, bytes_each: float) -> None:
    size = model_size(model, on_gpu=True)
    assert size.weight_bytes == pytest.approx(billions * 1e9 * bytes_each)
    assert size.file_bytes == size.weight_bytes


# Of their config.json: 2 (keys, values) × layers × heads of keys × size of a head × 2 bytes.
@pytest.mark.parametrize(
    ("model", "per_token"),
    [
        ("Qwen/Qwen2.5-1.5B", 2 * 28 * 2 * 128 * 2), ("meta-llama/Llama-3.1-8B", 2 * 32 * 8 * 128 * 2),
        ("Qwen/Qwen2.5-7B", 2 * 28 * 4 * 128 * 2), ("meta-llama/Llama-3.1-70B", 2 * 80 * 8 * 128 * 2),
        ("Qwen/Qwen3-32B", 2 * 64 * 8 * 128 * 2),
    ],
)  # fmt: skip
def test_keys_and_values_are_not_guessed_too_small(model: str, per_token: int) -> None:
    assert per_token <= model_size(model, on_gpu=True).kv_bytes_per_token <= 2.6 * per_token


def test_parameters_win_over_names_and_files(tmp_path: Path) -> None:
    save_folder("llama", tmp_path / "tiny-7B")
    assert model_size(str(tmp_path / "tiny-7B"), parameters="2B", on_gpu=True).weight_bytes == 4_000_000_000
    assert model_size("org/some-7B", parameters="2B", on_gpu=True).weight_bytes == 4_000_000_000
    assert model_size(None, parameters="500M", on_gpu=True).weight_bytes == 1_000_000_000


def test_by_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    save_folder("llama", folder)
    size = model_size(str(folder), on_gpu=False)
    assert size.file_bytes == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size.origin == "its files"
    assert model_size(str(folder), dtype="bfloat16", on_gpu=True).weight_bytes < size.weight_bytes  # stored as float32


@pytest.mark.model
def test_eight_bits_with_their_scales_are_what_the_engine_takes(default_model: ModelSource) -> None:
    """A pool that is said to hold a request of a length must hold it."""
    serve = {"kv_cache_dtype": "int8", "max_model_len": 2048, "kv_cache_memory_bytes": 2048 * 11_520 * 17 // 16}
    workload_of(serve, {})
    with pytest.raises(ConfigError, match="2,048 tokens"):
        workload_of(serve | {"kv_cache_memory_bytes": serve["kv_cache_memory_bytes"] - 1}, {})
    spec = read_spec(default_model)
    kv = KVCache(num_layers=spec.num_layers, num_blocks=2048 // 16, block_size=16, num_kv_heads=spec.num_kv_heads,
                 head_dim=spec.head_dim, dtype=torch.int8, device=torch.device("cpu"))  # fmt: skip
    parts = (kv.k, kv.v, kv.k_scales, kv.v_scales)
    assert sum(part.nbytes for part in parts if part is not None) == serve["kv_cache_memory_bytes"]


@pytest.mark.model
def test_the_default_models_numbers_are_its_files(default_model: ModelSource) -> None:
    for on_gpu in (False, True):
        known, read = model_size(None, on_gpu=on_gpu), model_size(str(default_model.path), on_gpu=on_gpu)
        assert (known.weight_bytes, known.file_bytes) == (read.weight_bytes, read.file_bytes)
        assert (known.kv_bytes_per_token, known.max_positions) == (read.kv_bytes_per_token, read.max_positions)


def test_nothing_of_this_machine_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that has a hub model's name, a cache that holds it, settings in the environment."""
    before = workload_of({"model": "org/some-7B"})
    save_folder("llama", tmp_path / "org" / "some-7B")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TONLE_CACHE_DIR", str(tmp_path))
    snapshot = tmp_path / "hub" / "models--org--some-7B" / "snapshots" / "0"
    snapshot.parent.mkdir(parents=True)
    (tmp_path / "org" / "some-7B").rename(snapshot)
    (tmp_path / "org" / "some-7B").symlink_to(snapshot)
    assert os.path.exists("org/some-7B")  # noqa: PTH110
    after = workload_of({"model": "org/some-7B"})
    assert (after.size, after.storage_uri, after.model_name) == (before.size, "hf://org/some-7B", "org/some-7B")


@pytest.mark.parametrize(
    ("serve", "deploy", "requests", "limits"),
    [
        ({}, {}, {"cpu": "2", "memory": "3Gi"}, {"memory": "3Gi"}),
        ({}, {"cpu_limit": 1}, {"cpu": "1", "memory": "3Gi"}, {"cpu": "1", "memory": "3Gi"}),
        ({"model": "org/some-7B"}, {"gpu": "L4"}, {"cpu": "4", "memory": "18Gi", "nvidia.com/gpu": "1"},
         {"memory": "18Gi", "nvidia.com/gpu": "1"}),
        ({"model": "org/some-7B"}, {"gpu": "A10G", "engine": "vllm", "cpu": 4, "cpu_limit": 8, "memory_bytes": 16 * GIB,
                                    "memory_limit_bytes": 32 * GIB},
         {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}, {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "1"}),
        ({"model": "org/some-70B"}, {"gpu": "H100", "gpus": 2, "engine": "vllm"},
         {"cpu": "4", "memory": "139Gi", "nvidia.com/gpu": "2"}, {"memory": "139Gi", "nvidia.com/gpu": "2"}),
    ],
)  # fmt: skip
def test_what_a_pod_asks_for(
    serve: dict[str, Any], deploy: dict[str, Any], requests: dict[str, str], limits: dict[str, str]
) -> None:
    assert resources(workload_of(serve, deploy)) == {"requests": requests, "limits": limits}


def test_on_a_cpu_keys_and_values_take_what_their_dtype_says() -> None:
    """4,096 tokens of a 7B model take 0.5 GiB in bfloat16, which the usual 640 MiB hold, and twice that in float32. By default it
    may be float32: the processor is not known."""
    serve = {"model": "org/some-7B", "max_model_len": 4096}
    workload_of(serve | {"dtype": "bfloat16"})
    for dtype in ({}, {"dtype": "float32"}):
        with pytest.raises(ConfigError, match="one request of 4,096 tokens takes 1016 MiB of KV cache"):
            workload_of(serve | dtype)


def test_a_cache_holds_what_is_fetched() -> None:
    large = workload_of({"model": "org/some-70B"}, {"gpu": "H100", "gpus": 2, "engine": "vllm"}).resources
    assert large.fetch_bytes > 140e9 and large.cache_bytes < 20 * GIB
    assert workload_of({}, {"model_cache_bytes": 5 * GIB}).resources.fetch_bytes == 5 * GIB


def test_a_start_has_time_to_load_and_compile() -> None:
    assert 180 < workload_of().start_s < 300
    assert workload_of({"model": "org/some-7B"}, {"gpu": "L4"}).start_s < 600
    assert workload_of({"model": "org/some-7B"}, {"gpu": "L4", "engine": "vllm"}).start_s >= 600 + 2 * 14e9 / 1e8


def test_quantities() -> None:
    assert [quantity(number) for number in (GIB, 3 * GIB, GIB + 1, 1536 * 1024**2)] == [
        "1Gi",
        "3Gi",
        "1025Mi",
        "1536Mi",
    ]


def test_gpus_by_their_names() -> None:
    for name in ("a10g", "NVIDIA A10G", "A10", "a100", "nvidia-l4", "RTX 4090", "rtx_4090", "H100-80GB"):
        assert find_gpu(name).name in GPUS
    assert len({label for gpu in GPUS.values() for label in gpu.node_labels}) >= len(GPUS)
