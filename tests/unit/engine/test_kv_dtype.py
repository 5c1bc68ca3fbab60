"""`kv_cache_dtype`: what `auto` is, that the log and the card say which, and how much memory is taken."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import save_folder, tiny_model
from tests.fakes.driver import Driver
from tests.fakes.other_models import other_model, save_other
from tonle.config.engine import EngineConfig
from tonle.engine.machine import default_pool_bytes
from tonle.errors import ConfigError
from tonle.models.cpu import cpu_decoder
from tonle.models.cpu.tiles import has_tiles
from tonle.models.source import ModelSource, resolve

PACKED: dict[str, Any] = {"device": "cpu", "quantization": "int8", "quantization_group_size": 32}
HEAD_DIM = 64
SUITED = "int8" if has_tiles(HEAD_DIM, 16) else "float32"
HEAD = {"int8": HEAD_DIM + 4, "float32": 4 * HEAD_DIM}  # bytes of a head, with its scale


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_folder("llama", path, head_dim=HEAD_DIM)
    return resolve(path)


@pytest.fixture(autouse=True)
def _compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is computed here."""
    monkeypatch.setattr(cpu_decoder, "warm_later", lambda types, done: threading.Thread())


@pytest.mark.parametrize(("settings", "expected"), [
    (PACKED, SUITED),
    (PACKED | {"kv_cache_dtype": "float32"}, "float32"),
    (PACKED | {"kv_cache_dtype": "int8"}, "int8"),
    (PACKED | {"block_size": 32}, SUITED),
    (PACKED | {"block_size": 8}, "float32"),  # attention has no kernels for int8 and such blocks
    (PACKED | {"activation_bits": 16}, "float32"),
    (PACKED | {"activation_bits": 16, "kv_cache_dtype": "int8"}, "int8"),
    (PACKED | {"dtype": "float32"}, "float32"),  # through torch, where nothing is rounded
    (PACKED | {"dtype": "bfloat16"}, "bfloat16"),
    (PACKED | {"load_format": "random"}, "float32"),
    ({"device": "cpu"}, "float32"),  # float weights
    ({"device": "cpu", "kv_cache_dtype": "int8"}, "int8"),
])  # fmt: skip
def test_what_it_is_and_that_the_log_says_so(
    source: ModelSource, settings: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tonle")
    card = Driver(source, EngineConfig(max_sequence_length=64, **settings)).card
    assert card.kv_dtype == expected
    tokens = card.num_blocks * settings.get("block_size", 16)
    assert f"KV cache of 0.02 GiB in {expected}: {tokens} tokens" in caplog.text


def test_a_model_that_runs_through_transformers_has_them_as_it_computes(tmp_path: Path) -> None:
    save_other(other_model("gpt2"), tmp_path)
    for asked in ("auto", "float32"):
        assert Driver(resolve(tmp_path), EngineConfig(device="cpu", kv_cache_dtype=asked)).card.kv_dtype == "float32"
    with pytest.raises(ConfigError, match="does not read keys and values in int8"):
        Driver(resolve(tmp_path), EngineConfig(device="cpu", kv_cache_dtype="int8"))


def test_a_live_model_is_computed_as_it_is() -> None:
    assert Driver(tiny_model("llama")).card.kv_dtype == "float32"
    assert Driver(tiny_model("llama"), EngineConfig(kv_cache_dtype="float32")).card.kv_dtype == "float32"


@pytest.mark.parametrize(("asked", "expected"), [("auto", SUITED), ("int8", "int8"), ("float32", "float32")])
def test_a_draft_model_has_the_one_that_suits_its_own_weights(source: ModelSource, asked: str, expected: str) -> None:
    settings = PACKED | {"max_sequence_length": 64, "memory_pool_size": 2**22, "kv_cache_dtype": asked}
    card = Driver(source, EngineConfig(speculation_model=str(source.path), **settings)).card
    own = "int8" if asked == "int8" else "float32"  # its weights are floats
    assert card.kv_dtype == expected
    assert card.num_blocks == 2**22 // (_block_bytes(expected) + _block_bytes(own))


def _block_bytes(dtype: str) -> int:
    return 2 * 2 * 16 * 2 * HEAD[dtype]  # keys and values, layers, tokens, heads


def test_int8_takes_half_the_memory_unless_told_otherwise() -> None:
    cpu, config = torch.device("cpu"), EngineConfig()
    assert default_pool_bytes(cpu, config, torch.float32) == 640 * 2**20
    assert default_pool_bytes(cpu, config, torch.bfloat16) == 640 * 2**20
    assert default_pool_bytes(cpu, config, torch.int8) == 320 * 2**20


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "float32"}])
def test_the_default_memory_is_that_of_its_dtype(source: ModelSource, settings: dict[str, Any]) -> None:
    card = Driver(source, EngineConfig(max_sequence_length=64, memory_pool_size=None, **PACKED, **settings)).card
    expected = 320 if card.kv_dtype == "int8" else 640
    assert card.num_blocks == expected * 2**20 // _block_bytes(card.kv_dtype)
