"""Writes the files of this folder: one matrix in each form, packed and unpacked again by the library that defines the form.

Run once, with the packages unpacked side by side in one folder, since some of them cannot be imported without a GPU:

    pip download --no-deps autoawq==0.2.9 auto-gptq==0.7.1 gptqmodel==7.7.0 bitsandbytes==0.50.2 compressed-tensors==0.20.0 loguru
    (unpack each into FOLDER)
    PYTHONPATH=FOLDER python -m tests.fakes.quantized_layers.make FOLDER

Each file holds the tensors of a matrix `layer` under the names they have in checkpoints, `layer.bias` never, and `expected`, the
matrix (out, in) in float32 as the library unpacks it. Tests read the files, not these libraries.
"""

from __future__ import annotations

import ast
import importlib
import math
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
OUTPUTS, INPUTS, GROUP = 32, 128, 32

Tensors = dict[str, torch.Tensor]


def weight() -> torch.Tensor:
    """(out, in), each output with a size and an offset of its own."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(OUTPUTS, 1, generator=generator) + 0.5
    offset = torch.rand(OUTPUTS, 1, generator=generator) - 0.3
    return (torch.randn(OUTPUTS, INPUTS, generator=generator) * spread + offset) * 0.05


def linear(values: torch.Tensor) -> nn.Linear:
    made = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float16)
    made.weight.data = values.half()
    return made


def affine(values: torch.Tensor, bits: int, group_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scale, zero (out, groups), for values rounded to them."""
    groups = [values[:, group_of == group] for group in range(int(group_of.max()) + 1)]
    low = torch.stack([group.amin(dim=1).clamp(max=0) for group in groups], dim=1)
    high = torch.stack([group.amax(dim=1).clamp(min=0) for group in groups], dim=1)
    scale = ((high - low) / (2**bits - 1)).half().float()
    return scale, (-low / scale).round().clamp(1, 2**bits - 1)  # at least 1: the first version of GPTQ stores zero - 1


def save(name: str, tensors: Tensors, expected: torch.Tensor, **about: str) -> None:
    named = {f"layer.{key}": tensor.contiguous().clone() for key, tensor in tensors.items()}
    save_file({**named, "expected": expected.float().contiguous()}, HERE / f"{name}.safetensors", metadata=about)


def bare(folder: Path, package: str) -> None:
    """Make modules of a package importable without running its __init__.py, which wants a GPU."""
    module = types.ModuleType(package)
    module.__path__ = [str(folder / package.replace(".", "/"))]
    sys.modules[package] = module


def awq(folder: Path) -> None:
    for package in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        bare(folder, package)
    utils = types.ModuleType("awq.utils.utils")
    utils.get_best_device = lambda: "cpu"  # type: ignore[attr-defined]
    sys.modules["awq.utils.utils"] = utils
    gemm = importlib.import_module("awq.modules.linear.gemm")
    packing = importlib.import_module("awq.utils.packing_utils")
    scale, zero = affine(weight(), 4, torch.arange(INPUTS) // GROUP)
    made = gemm.WQLinear_GEMM.from_linear(linear(weight()), 4, GROUP, scales=scale.t().half(), zeros=zero.t())
    tensors = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}
    unpacked = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, GROUP)
    save("awq", tensors, unpacked.t(), library="autoawq 0.2.9")


def gptq(folder: Path) -> None:
    for package in ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear"):
        bare(folder, package)
    module = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(2))
    in_order, shuffled = torch.arange(INPUTS) // GROUP, torch.empty(INPUTS, dtype=torch.int64)
    shuffled[order] = in_order
    for name, bits, group_of in (("gptq_4", 4, in_order), ("gptq_8", 8, in_order), ("gptq_act_order", 4, shuffled)):
        made = module.QuantLinear(bits, GROUP, INPUTS, OUTPUTS, False, weight_dtype=torch.float16)
        scale, zero = affine(weight(), bits, group_of)
        made.pack(linear(weight()), scale.half(), zero.clone(), group_of.int())
        tensors = {key: getattr(made, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
        unpacked = _times_identity(made)
        save(name, tensors, unpacked, library="auto-gptq 0.7.1")


def _times_identity(made: Any) -> torch.Tensor:
    """(out, in): what the library's own product makes of a unit vector for each input."""
    made.scales = made.scales.float()
    return made(torch.eye(INPUTS)).t()


def gptq_v2(folder: Path) -> None:
    """Only the function that packs: the package needs a dozen others."""
    file = folder / "gptqmodel" / "nn_modules" / "qlinear" / "__init__.py"
    (function,) = (
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "pack_original"
    )
    function.decorator_list = []
    limits = types.SimpleNamespace(threadpool_limits=lambda _: nullcontext())
    space: dict[str, Any] = {"t": torch, "np": np, "nn": nn, "math": math, "transformers": transformers,
                             "THREADPOOLCTL": limits, "_ConvNd": nn.modules.conv._ConvNd}  # fmt: skip
    exec(compile(ast.Module([function], []), str(file), "exec"), space)
    layer = nn.Module()
    layer.bits, layer.maxq, layer.planar, layer.pack_dtype_bits, layer.pack_factor = 4, 15, False, 32, 8  # type: ignore[assignment]
    layer.pack_np_math_dtype, layer.pack_np_dtype, layer.bias = np.uint32, np.int32, None  # type: ignore[assignment]
    group_of = torch.arange(INPUTS) // GROUP
    scale, zero = affine(weight(), 4, group_of)
    zero[0, 0] = 0  # the first version has no room for it
    space["pack_original"](layer, linear(weight()), scale.half(), zero.clone().half(), group_of.int())
    tensors = {key: getattr(layer, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
    ratio = (weight().half() + (zero * scale).half()[:, group_of]) / scale.half()[:, group_of]
    numbers = ratio.round().clamp(0, 15).float()
    save("gptq_v2", tensors, (numbers - zero[:, group_of]) * scale[:, group_of], library="gptqmodel 7.7.0")


def bitsandbytes() -> None:
    from bitsandbytes import functional

    for name, kind, nested in (("nf4", "nf4", False), ("nf4_nested", "nf4", True), ("fp4", "fp4", True)):
        values = weight().repeat(5, 1) if nested else weight()  # enough scales for two blocks of them
        packed, state = functional.quantize_4bit(values, blocksize=64, quant_type=kind, compress_statistics=nested)
        tensors = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        expected = functional.dequantize_4bit(packed, state)
        save(name, {"weight": packed, **tensors}, expected, library="bitsandbytes 0.50.2")
    numbers, scale, _ = functional.int8_vectorwise_quant(weight().half())
    tensors = {"weight": numbers, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    save("bnb_int8", tensors, functional.int8_vectorwise_dequant(numbers, scale), library="bitsandbytes 0.50.2")


def compressed() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    def one(name: str, form: str, **args: Any) -> None:
        how = QuantizationArgs(**args)
        scheme = QuantizationScheme(targets=["Linear"], weights=how)
        blocks = _blocks(weight(), how)
        scale, zero = calculate_qparams(blocks.amin(dim=-1), blocks.amax(dim=-1), how)
        given = {"weight": weight(), "weight_scale": scale.float(), "weight_zero_point": zero.to(how.pytorch_dtype())}
        compressor = BaseCompressor.get_value_from_registry(form)
        made = compressor.compress(given, scheme)
        expected = compressor.decompress(made, scheme)["weight"]
        save(name, made, expected, library="compressed-tensors 0.20.0", config=how.model_dump_json(), format=form)

    one("ct_int4", "pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=True)
    one("ct_int4_zeros", "pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False)
    one("ct_int8_packed", "pack-quantized", num_bits=8, strategy="channel", symmetric=True)
    one("ct_int8", "int-quantized", num_bits=8, strategy="channel", symmetric=True)
    one("ct_int8_zeros", "int-quantized", num_bits=8, strategy="channel", symmetric=False)
    one("ct_fp8_tensor", "float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True)
    one("ct_fp8_channel", "float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True)
    one("ct_fp8_block", "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 64])


def _blocks(values: torch.Tensor, how: Any) -> torch.Tensor:
    """(…, numbers that share a scale), the outer shape that of the scale."""
    match how.strategy:
        case "group":
            return values.unflatten(1, (-1, how.group_size))
        case "tensor":
            return values.flatten()[None]
        case "block":
            height, width = how.block_structure
            return values.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2)
        case _:
            return values[:, None]


def main() -> None:
    folder = Path(sys.argv[1])
    awq(folder)
    gptq(folder)
    gptq_v2(folder)
    bitsandbytes()
    compressed()


if __name__ == "__main__":
    main()
