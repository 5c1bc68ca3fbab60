"""Sizes of models: counted from names, config.json, GGUF files and plain numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tonle.advise.gguf_head import read_gguf_head
from tonle.advise.known_shapes import KNOWN_SHAPES, known_shape
from tonle.advise.precision import KV_PRECISIONS, PRECISIONS
from tonle.advise.read_model import find_model
from tonle.advise.shape import shape_of_numbers
from tonle.errors import ConfigError, ModelError

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [  # as their model cards say
        ("llama-3.1-70b", 70_553_706_496, None),
        ("llama-3.1-8b", 8_030_261_248, None),
        ("llama-3.2-3b", 3_212_749_824, None),
        ("llama-2-7b", 6_738_415_616, None),
        ("qwen2.5-1.5b", 1_543_714_304, None),
        ("qwen2.5-72b", 72_706_203_648, None),
        ("smollm2-135m", 134_515_008, None),
        ("mixtral-8x7b", 46_702_792_704, 12_748_000_000),
        ("qwen3-30b-a3b", 30_532_122_624, 3_040_000_000),
    ],
)
def test_parameters_of_public_models(name: str, parameters: int, active: int | None) -> None:
    shape = known_shape(name)
    assert shape is not None
    assert shape.parameters == pytest.approx(parameters, rel=1e-3)  # without biases
    assert shape.active_parameters == pytest.approx(
        active or parameters - (0 if shape.tied else shape.embedding_parameters), rel=2e-3
    )


def test_weights_and_kv_of_a_70b_model_by_hand() -> None:
    shape = find_model("llama-3.1-70b")
    # per layer: q and o 8192 × 8192 each, k and v 8192 × 1024 each, three of 8192 × 28672, two norms of 8192
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672 + 2 * 8192
    ends = 2 * 128_256 * 8192
    assert shape.block_parameters == 80 * layer
    assert shape.weight_bytes(PRECISIONS["bf16"]) == 2 * (80 * layer + ends)
    assert shape.weight_bytes(PRECISIONS["fp8"]) == 80 * layer + 2 * ends
    assert shape.weight_bytes(PRECISIONS["int4"]) == pytest.approx(80 * layer * (0.5 + 2.5 / 128) + 2 * ends)
    assert shape.kv_bytes_per_token(KV_PRECISIONS["bf16"]) == 2 * 80 * 8 * 128 * 2 == 327_680
    assert shape.kv_bytes_per_token(KV_PRECISIONS["fp8"]) == 163_840


def test_experts_are_read_as_tokens_ask_for_them() -> None:
    shape = known_shape("mixtral-8x7b")
    assert shape is not None
    bf16 = PRECISIONS["bf16"]
    one, two, many = (shape.read_bytes(bf16, tokens) for tokens in (1, 2, 1000))
    assert one == 2 * shape.active_parameters
    assert one < two < many
    assert many == pytest.approx(2 * (shape.block_parameters + shape.head_parameters))
    # one token asks for 2 of 8 experts in each layer, two tokens on average for 8 · (1 − (3/4)²) = 3.5
    expert = 32 * 3 * 4096 * 14_336
    assert (two - one) / 2 == pytest.approx(1.5 * expert, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-3-70b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
        ("somebody/other-model", None),
    ],
)
def test_names_as_people_write_them(name: str, known: str | None) -> None:
    shape = known_shape(name)
    assert (shape and shape.origin) == (known and f"the public sizes of {known}")


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", None),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "int4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "int8"),
        ("maker/Llama-3.3-70B-Instruct-FP8-dynamic", "fp8"),
    ],
)
def test_a_name_says_in_which_precision_weights_are_stored(name: str, stored: str | None) -> None:
    assert find_model(name).stored_as == stored


def test_every_known_shape_is_sound() -> None:
    for name in KNOWN_SHAPES:
        shape = find_model(name)
        assert shape.parameters >= shape.active_block_parameters, name
        digits = name.rsplit("-", 2 if name.endswith("a3b") else 1)[1]  # "70b" of llama-3-70b
        if "x" not in digits:
            said = float(digits.rstrip("bm")) * (1e6 if digits.endswith("m") else 1e9)
            assert shape.parameters == pytest.approx(said, rel=0.25), name


def write_config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA_70B | changes))
    return folder


def test_a_folder_is_read_from_its_config(tmp_path: Path) -> None:
    shape = find_model(str(write_config(tmp_path)))
    known = find_model("llama-3.1-70b")
    assert (shape.parameters, shape.kv_heads, shape.context_length) == (known.parameters, 8, 131_072)
    assert shape.stored_as is None
    assert "config.json" in shape.origin


@pytest.mark.parametrize(
    ("quantization", "stored"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
            "int4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
    ],
)
def test_quantized_checkpoints_are_known(tmp_path: Path, quantization: dict[str, Any], stored: str) -> None:
    assert find_model(str(write_config(tmp_path, quantization_config=quantization))).stored_as == stored


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "wide"}, "hidden_size should be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers should be a whole number"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"num_key_value_heads": 7}, "cannot share 7 KV heads"),
        ({"num_local_experts": 8}, "num_experts_per_tok is missing"),
    ],
)
def test_configs_that_make_no_sense_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ModelError, ConfigError), match=words):
        find_model(str(write_config(tmp_path, **changes)))


def test_unknown_models_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"did you mean llama-3\.1-70b.*--params"):
        find_model("llama-3.1-70")
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        find_model(str(tmp_path))


# -- GGUF


def write_gguf(path: Path, *, output: bool = False) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(160)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_token_list([f"token {number}" for number in range(320)])
    writer.add_array("tokenizer.ggml.token_type", [1] * 320)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    for layer in range(2):
        blocks = np.zeros((160, 64 // 32 * 20), np.uint8)  # Q4_1: 20 bytes for 32 numbers
        writer.add_tensor(f"blk.{layer}.ffn_up.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    if output:
        writer.add_tensor("output.weight", np.zeros((320, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_read_from_its_head(tmp_path: Path) -> None:
    shape = find_model(str(write_gguf(tmp_path / "tiny.gguf")))
    assert (shape.layers, shape.hidden_size, shape.heads, shape.kv_heads, shape.head_size) == (2, 64, 4, 2, 16)
    assert (shape.embedding_parameters, shape.tied, shape.context_length) == (320 * 64, True, 1024)
    assert shape.stored_as == "Q4_1"
    assert shape.file_bytes == (tmp_path / "tiny.gguf").stat().st_size
    assert find_model(str(tmp_path)).name == str(tmp_path / "tiny.gguf")
    assert not find_model(str(write_gguf(tmp_path / "two.gguf", output=True))).tied


def test_broken_gguf_files_are_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    broken = tmp_path / "broken.gguf"
    for content, words in (
        (b"", "ends too early"),
        (b"ZIP!" + whole[4:], "not a GGUF file"),
        (whole[:4] + b"\x09\x00\x00\x00" + whole[8:], "version 9"),
        (whole[:400], "ends too early"),
        (whole[:8] + b"\xff" * 8 + whole[16:], "announces"),
    ):
        broken.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            read_gguf_head(broken)
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf file"):
        read_gguf_head(tmp_path / "model.bin")


# -- plain numbers


def test_numbers_of_a_model_card() -> None:
    shape = shape_of_numbers(parameters=70_000_000_000, layers=80, kv_heads=8, head_size=128)
    assert shape.parameters == 70_000_000_000
    assert shape.kv_bytes_per_token(KV_PRECISIONS["bf16"]) == 327_680
    assert 7000 < shape.hidden_size < 9500
    assert "estimated" in shape.origin
    exact = shape_of_numbers(
        parameters=70_000_000_000, layers=80, kv_heads=8, head_size=128, heads=64, hidden_size=8192, vocab_size=128_256
    )
    assert exact.origin == "your numbers"
    assert exact.block_parameters == 70_000_000_000 - 2 * 128_256 * 8192


def test_experts_by_numbers_are_all_read_in_a_large_batch() -> None:
    shape = shape_of_numbers(parameters=47 * 10**9, active_parameters=13 * 10**9, layers=32, kv_heads=8, head_size=128)
    one, many = (shape.read_bytes(PRECISIONS["bf16"], tokens) for tokens in (1, 1000))
    assert one == pytest.approx(2 * 13e9)
    assert many == pytest.approx(2 * 47e9)
    assert "1 of 4 experts per token" in shape.origin


def test_experts_that_every_token_asks_for_are_read_once(tmp_path: Path) -> None:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
    shape = find_model(str(write_config(tmp_path, **experts)))
    assert shape.read_bytes(PRECISIONS["bf16"], 1) == shape.read_bytes(PRECISIONS["bf16"], 64)


def test_numbers_that_contradict_each_other_are_refused() -> None:
    base: dict[str, Any] = {"parameters": 1_000_000, "layers": 2, "kv_heads": 2, "head_size": 16}
    with pytest.raises(ConfigError, match="cannot be more than"):
        shape_of_numbers(**base, active_parameters=2_000_000)
    with pytest.raises(ConfigError, match="more than the model's parameters"):
        shape_of_numbers(**base, vocab_size=1_000_000)
