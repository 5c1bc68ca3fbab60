"""Quantizing weights that are not: `quantize` for one matrix, `quantizing` for all of a model as it is loaded.

Does: round to the nearest of few numbers, group by group, without data. Does not: read or write files (`load/`,
`write_quantized.py`), or pack for kernels. The same matrix gives the same numbers wherever it is done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from tonle.models.layers import Quantized, Weight
from tonle.models.spec import ModelSpec
from tonle.models.weights import EMBEDDING, LM_HEAD, Fetch, Storage, Weights, assemble

FewBits = Literal["int8", "int4", "fp8"]

_MATRICES = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight",
             "down_proj.weight")  # fmt: skip
_MIN_GROUP = 32  # inputs: with fewer, scales take as much room as numbers save; also what the kernels for CPUs have
_CHUNK = 1 << 24  # numbers at a time: bounds what rounding needs beside the matrix, some 20 bytes each
_FP8_MAX = 448.0  # of float8_e4m3fn
_HALF_STEP, _HALF_NORMAL = 2.0**-24, 2.0**-14  # between float16 numbers below the second, which are few


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a model's matrices become when they are loaded."""

    to: Literal["none", "int8", "int4", "fp8"]  # none: unpacked to the dtype of the model
    group_size: int = 128  # inputs that share a scale, at most; 0: one scale for each output. fp8 always has that


def quantize(weight: torch.Tensor, to: FewBits, group_size: int) -> Quantized:
    """weight (out, in), on the device where it is done. Groups are as large as `group_size` allows. Scales are numbers that half
    precision holds, the weight's own or bfloat16: as files and kernels have them."""
    group = group_of(weight.shape[1], group_size)
    rows = max(1, _CHUNK // weight.shape[1])
    half = weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    parts = [_quantize_rows(chunk.float(), to, group, half) for chunk in torch.split(weight, rows)]
    joined = Quantized.join(parts)
    assert joined is not None
    return joined


def group_of(inputs: int, group_size: int) -> int:
    """Inputs of a group: the largest that divides both; all of them where that would be few."""
    group = math.gcd(inputs, group_size) if group_size else inputs
    return group if group >= _MIN_GROUP else inputs


def _quantize_rows(weight: torch.Tensor, to: FewBits, group: int, half: torch.dtype) -> Quantized:
    match to:
        case "int8":
            return _int8(weight, group, half)
        case "int4":
            return _int4(weight, group, half)
        case "fp8":
            scale = _scale(weight.abs().amax(dim=1, keepdim=True) / _FP8_MAX, half)
            return Quantized((weight / scale).to(torch.float8_e4m3fn), scale.to(half))


def _int8(weight: torch.Tensor, group: int, half: torch.dtype) -> Quantized:
    """Symmetric: -127 to 127."""
    grouped = weight.reshape(len(weight), -1, group)
    scale = _scale(grouped.abs().amax(dim=2) / 127, half)
    numbers = (grouped / scale[..., None]).round_().clamp_(-127, 127)
    return Quantized(numbers.to(torch.int8).flatten(1), scale.to(half))


def _int4(weight: torch.Tensor, group: int, half: torch.dtype) -> Quantized:
    """0 to 15, less a zero point which is one of them, so that 0 stays 0. Measured: symmetric numbers, or groups whose range is
    narrowed until their squared error is smallest, give a larger perplexity."""
    grouped = weight.reshape(len(weight), -1, group)
    low, high = grouped.amin(dim=2).clamp_(max=0), grouped.amax(dim=2).clamp_(min=0)  # (out, groups)
    scale = _scale((high - low) / 15, half)
    zero = (low / -scale).round_().clamp_(0, 15)
    numbers = (grouped / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, 15)
    return Quantized(numbers.to(torch.uint8).flatten(1), scale.to(half), zero * -scale, bits=4)


def _scale(found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded; 1 for groups of zeros. Where float16 has few numbers, up: otherwise a group's largest would be too large, which
    float8_e4m3fn of some versions of torch makes NaN."""
    rounded = found.to(dtype).float()
    if dtype == torch.float16:
        rounded = torch.where(found < _HALF_NORMAL, (found / _HALF_STEP).ceil() * _HALF_STEP, rounded)
    return torch.where(rounded > 0, rounded, 1.0)


def _form(weight: Quantized) -> str:
    if weight.table is not None:
        return "table"
    return "fp8" if weight.numbers.dtype == torch.float8_e4m3fn else f"int{weight.bits}"


def is_quantizable(name: str) -> bool:
    """Whether `name` is one of the large matrices: of a layer, or the last. Embeddings are read by rows, routers are small."""
    return name == LM_HEAD or name.endswith(_MATRICES)


def assemble_quantized(
    spec: ModelSpec, fetch: Fetch, storage: Storage, how: Quantization | None, device: torch.device, dtype: torch.dtype
) -> Weights:
    """`assemble`, with matrices in the form `how` asks for; None: as they are stored."""
    if how is None:
        return assemble(spec, fetch, storage)
    return assemble(spec, quantizing(spec, fetch, how, device, dtype), storage, own_head=how.to != "none")


def quantizing(spec: ModelSpec, fetch: Fetch, how: Quantization, device: torch.device, dtype: torch.dtype) -> Fetch:
    """`fetch`, with matrices in the form `how` asks for, made on the device, unless they are stored in it. The last matrix
    is always int8 (fp8 there costs more perplexity than everywhere else); where it is the embedding, `LM_HEAD` gives it so."""

    def fetch_quantized(name: str) -> Weight:
        weight = fetch(EMBEDDING if name == LM_HEAD and spec.tie_embeddings else name)
        if how.to == "none" or not is_quantizable(name):
            return weight.unpacked(dtype) if isinstance(weight, Quantized) else weight
        to: FewBits = "int8" if name == LM_HEAD else how.to
        if isinstance(weight, Quantized):
            if _form(weight) == to:
                return weight
            weight = weight.to(device).unpacked(torch.float32)
        return quantize(weight.to(device), to, how.group_size)

    return fetch_quantized
