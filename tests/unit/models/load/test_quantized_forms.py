"""Each quantized form is read as the library that defines it unpacks it (`tests/fakes/quantized_layers`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tonle.errors import ModelError
from tonle.models.cpu.stored import from_quantized
from tonle.models.layers import Quantized
from tonle.models.load.quantized import QuantizedTensors, read_form
from tonle.models.load.quantized.mxfp4 import mxfp4
from tonle.models.load.stored_tensors import StoredTensors

LAYERS = Path(__file__).parents[3] / "fakes" / "quantized_layers"
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
CT = {"quant_method": "compressed-tensors"}
CT_BLOCK = {**CT, "config_groups": {"group_0": {"weights": {"block_structure": [16, 64]}}}}

# File, settings, the numbers a matrix must be held in; None: floats
FORMS: list[tuple[str, dict[str, Any], str | None]] = [
    ("awq", AWQ, "int4"),
    ("gptq_4", GPTQ, "int4"),
    ("gptq_8", GPTQ, "int8"),
    ("gptq_act_order", {**GPTQ, "desc_act": True}, None),
    ("gptq_v2", {**GPTQ, "checkpoint_format": "gptq_v2"}, "int4"),
    ("gptq_v2", {**GPTQ, "format": "gptq_v2"}, "int4"),  # as transformers 5 calls it
    ("nf4", BNB, "table"),
    ("nf4_nested", BNB, "table"),
    ("fp4", BNB, "table"),
    ("bnb_int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
    ("ct_int4", {**CT, "format": "pack-quantized"}, "int4"),
    ("ct_int4_zeros", {**CT, "format": "pack-quantized"}, "int4"),
    ("ct_int8_packed", {**CT, "format": "pack-quantized"}, "int8"),
    ("ct_int8", {**CT, "format": "int-quantized"}, "int8"),
    ("ct_int8_zeros", {**CT, "format": "int-quantized"}, "int8"),
    ("ct_fp8_tensor", {**CT, "format": "float-quantized"}, "fp8"),
    ("ct_fp8_channel", {**CT, "format": "float-quantized"}, "fp8"),
    ("ct_fp8_block", CT_BLOCK, "fp8"),
]


def form_of(weight: torch.Tensor | Quantized) -> str | None:
    if isinstance(weight, torch.Tensor):
        return None
    if weight.table is not None:
        return "table"
    return "fp8" if weight.numbers.dtype == torch.float8_e4m3fn else f"int{weight.bits}"


def unpacked(weight: torch.Tensor | Quantized) -> torch.Tensor:
    return weight.float() if isinstance(weight, torch.Tensor) else weight.unpacked(torch.float32)


def open_layer(folder: Path, settings: dict[str, Any]) -> QuantizedTensors:
    form = read_form({"quantization_config": settings})
    assert form is not None
    return QuantizedTensors(StoredTensors(folder), form)


@pytest.mark.parametrize(("name", "settings", "wanted"), FORMS, ids=[name for name, _, _ in FORMS])
def test_as_its_library_unpacks_it(tmp_path: Path, name: str, settings: dict[str, Any], wanted: str | None) -> None:
    shutil.copy(LAYERS / f"{name}.safetensors", tmp_path / "model.safetensors")
    expected = load_file(LAYERS / f"{name}.safetensors")["expected"]
    tensors = open_layer(tmp_path, settings)
    assert tensors.shapes == {"layer.weight": tuple(expected.shape), "expected": tuple(expected.shape)}
    weight = tensors.get("layer.weight")
    assert form_of(weight) == wanted
    # compressed-tensors computes in the scale's dtype, bitsandbytes in float32 with another order of operations
    torch.testing.assert_close(unpacked(weight), expected, rtol=2e-6, atol=1e-7)
    if isinstance(weight, Quantized):
        stored = from_quantized(weight)
        exact = wanted in ("int4", "int8")
        assert (stored.scale is not None) == exact
        torch.testing.assert_close(
            torch.from_numpy(stored.floats()), expected, rtol=2e-6 if exact else 2**-8, atol=1e-7
        )


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (320,), (320, 1), (3, 2)])
def test_fp8_scales(tmp_path: Path, shape: tuple[int, ...], scale: str) -> None:
    """For the whole matrix, for each output, for each block of 128 x 128, the last of which is cut short."""
    numbers = torch.randn(320, 200).to(torch.float8_e4m3fn)
    factors = torch.rand(shape) + 0.5
    save_file({"layer.weight": numbers, f"layer.{scale}": factors, "layer.input_scale": torch.ones(1)},
              tmp_path / "model.safetensors")  # fmt: skip
    tensors = open_layer(
        tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128] if shape == (3, 2) else None}
    )
    assert tensors.shapes == {"layer.weight": (320, 200)}
    rows, columns = torch.arange(320)[:, None], torch.arange(200)[None]
    each = factors[rows // 128, columns // 128] if shape == (3, 2) else factors.reshape(-1, 1)
    assert torch.equal(unpacked(tensors.get("layer.weight")), numbers.float() * each)


def test_a_block_larger_than_the_matrix(tmp_path: Path) -> None:
    """No memory is taken for what it would have beyond the matrix."""
    numbers, scale = torch.randn(32, 64).to(torch.float8_e4m3fn), torch.rand(1, 2)
    save_file({"layer.weight": numbers, "layer.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    tensors = open_layer(tmp_path, {"quant_method": "fp8", "weight_block_size": [2**50, 32]})
    expected = numbers.float() * scale.repeat_interleave(32, dim=1)
    assert torch.equal(unpacked(tensors.get("layer.weight")), expected)


@pytest.mark.parametrize("name", ["blocksize", "nested_blocksize"])
def test_a_group_larger_than_the_matrix(tmp_path: Path, name: str) -> None:
    tensors = load_file(LAYERS / "nf4_nested.safetensors")
    state_name = "layer.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[state_name].tolist()))
    kept = {"blocksize": "layer.weight.absmax", "nested_blocksize": "layer.weight.nested_absmax"}[name]
    tensors[kept] = tensors[kept][:1]
    found = []
    for size in (tensors["expected"].numel(), 2**50):
        octets = torch.tensor(list(json.dumps({**state, name: size}).encode()), dtype=torch.uint8)
        save_file({**tensors, state_name: octets}, tmp_path / "model.safetensors")
        found.append(unpacked(open_layer(tmp_path, BNB).get("layer.weight")))
    assert torch.equal(*found)


def test_fp8_blocks_as_transformers_unpacks_them(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    numbers, scale = torch.randn(256, 384).to(torch.float8_e4m3fn), torch.rand(2, 3)
    save_file({"layer.weight": numbers, "layer.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    tensors = open_layer(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    expected = Fp8Dequantize(None)._dequantize_one(numbers, scale)
    assert torch.equal(unpacked(tensors.get("layer.weight")), expected)


def test_mxfp4_as_transformers_unpacks_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 134, (3, 8, 2), dtype=torch.uint8)
    save_file({"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales,
               "experts.down_proj_bias": torch.zeros(3, 8)}, tmp_path / "model.safetensors")  # fmt: skip
    tensors = open_layer(tmp_path, {"quant_method": "mxfp4"})
    assert tensors.shapes == {"experts.down_proj_blocks": (3, 8, 64), "experts.down_proj_bias": (3, 8)}
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)  # (experts, out, in)
    for expert in range(3):
        weight = tensors.get("experts.down_proj_blocks", expert)
        assert isinstance(weight, Quantized)
        assert torch.equal(weight.unpacked(torch.float32), expected[expert])
        stored = from_quantized(weight)  # multiples of one half: integers, without loss
        assert stored.numbers.dtype.name == "int8"
        assert torch.equal(torch.from_numpy(stored.floats()), expected[expert])
    assert torch.equal(mxfp4(blocks, scales).numbers[1], tensors.get("experts.down_proj_blocks", 1).numbers)  # type: ignore[union-attr]


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
def test_nf4_in_bytes_that_are_called_floats(tmp_path: Path, storage: torch.dtype) -> None:
    """`bnb_4bit_quant_storage`: training in shards needs one dtype for all parameters."""
    tensors = load_file(LAYERS / "nf4.safetensors")
    tensors["layer.weight"] = tensors["layer.weight"].flatten().view(storage)[:, None]
    save_file(tensors, tmp_path / "model.safetensors")
    weight = open_layer(tmp_path, BNB).get("layer.weight")
    assert form_of(weight) == "table"
    torch.testing.assert_close(unpacked(weight), tensors["expected"], rtol=2e-6, atol=1e-7)


def test_matrices_that_were_left_as_they_are(tmp_path: Path) -> None:
    own = load_file(LAYERS / "awq.safetensors")
    kept = torch.randn(4, 8)
    save_file({**own, "lm_head.weight": kept, "layer.bias": torch.ones(32)}, tmp_path / "model.safetensors")
    tensors = open_layer(tmp_path, AWQ)
    assert set(tensors.shapes) == {"layer.weight", "layer.bias", "lm_head.weight", "expected"}
    assert torch.equal(unpacked(tensors.get("lm_head.weight")), kept)


@pytest.mark.parametrize(
    ("name", "settings", "change", "said"),
    [
        ("awq", AWQ, {"layer.scales": None}, r"layer: layer\.scales is missing"),
        ("awq", AWQ, {"layer.scales": torch.ones(3, 32)}, "layer: 128 inputs cannot have 3 groups|do not fit together"),
        ("awq", AWQ, {"layer.qzeros": torch.ones(4, 3, dtype=torch.int32)}, "do not fit together"),
        ("gptq_4", GPTQ, {"layer.qzeros": torch.ones(4, 3, dtype=torch.int32)}, "GPTQ weights of 3 bits are not supported"),
        ("nf4", BNB, {"layer.weight.quant_state.bitsandbytes__nf4": None}, "is missing"),
        ("ct_int4", CT, {"layer.weight_shape": torch.tensor([32, 0])}, "do not fit together"),
        ("ct_int8", CT, {"layer.weight_scale": torch.ones(5, 7)}, "do not fit together: a scale of shape"),
        ("ct_fp8_tensor", CT, {"layer.weight": torch.ones(32, 128).to(torch.float8_e5m2)}, "float8_e5m2 are not supported"),
        ("awq", AWQ, {"layer.qweight": torch.ones(128, 4)}, r"layer\.qweight has type torch\.float32, not torch\.int32"),
        ("awq", AWQ, {"layer.qweight": torch.ones(128, 4, dtype=torch.int64)}, r"qweight has type torch\.int64"),
        ("awq", AWQ, {"layer.scales": torch.ones(4, 32, dtype=torch.int32)}, "scales has type .*, but should hold floats"),
        ("awq", AWQ, {"layer.qzeros": torch.ones(1, 4, dtype=torch.int32)}, "do not fit together: .* zero points"),
        ("gptq_act_order", GPTQ, {"layer.g_idx": torch.full((128,), -7, dtype=torch.int32)}, "g_idx of shape .* from -7 on"),
        ("nf4", BNB, {"layer.weight.absmax": torch.ones(0)}, "do not fit together: a table of 16 and 0 scales"),
        ("nf4", BNB, {"layer.weight.quant_map": torch.ones(8)}, "do not fit together: a table of 8"),
        ("nf4_nested", BNB, {"layer.weight.absmax": torch.ones(64)}, r"absmax has type torch\.float32, not torch\.uint8"),
        ("bnb_int8", BNB, {"layer.SCB": torch.ones(0)}, "do not fit together: scales of shape"),
        ("bnb_int8", BNB, {"layer.SCB": torch.ones(16)}, "do not fit together: scales of shape"),
        ("ct_int8", CT, {"layer.weight_scale": torch.ones(32, 1, dtype=torch.uint8)}, "but should hold floats"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(
    tmp_path: Path, name: str, settings: dict[str, Any], change: dict[str, torch.Tensor | None], said: str
) -> None:
    tensors = {**load_file(LAYERS / f"{name}.safetensors"), **change}
    save_file({key: value for key, value in tensors.items() if value is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=said) as caught:
        open_layer(tmp_path, settings).get("layer.weight")
    assert str(tmp_path) in caught.value.message
