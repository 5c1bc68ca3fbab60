"""Weights in few bits, for measurements: as `--quantization` makes them, and nf4, which only files have."""

from __future__ import annotations

from typing import cast

import torch

from tonle.models.layers import Quantized
from tonle.models.quantize import FewBits
from tonle.models.quantize import quantize as quantize_as_served

FORMS = ("fp8", "int8", "int4", "nf4")
_GROUP = 128  # inputs that share a scale, of integers
_NF4_GROUP = 64
_NF4 = (-1.0, -0.6961928, -0.5250731, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302, 0.2461123,
        0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)  # fmt: skip


def quantize(weight: torch.Tensor, form: str) -> Quantized:
    """weight (out, in)."""
    if form != "nf4":
        return quantize_as_served(weight.to(torch.bfloat16), cast("FewBits", form), _GROUP)
    grouped = weight.float().view(weight.shape[0], -1, _NF4_GROUP)
    most = grouped.abs().amax(2, keepdim=True).clamp(min=1e-12)
    table = torch.tensor(_NF4, device=weight.device)
    middles = (table[1:] + table[:-1]) / 2
    numbers = torch.bucketize(grouped / most, middles).to(torch.uint8).view_as(weight)
    return Quantized(numbers, most[..., 0], table=table, bits=4)
