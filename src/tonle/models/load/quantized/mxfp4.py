"""MXFP4: numbers of four bits (sign, two of exponent, one of fraction), 32 of which share a power of two.

    NAME_blocks (experts, out, in / 32, 16) uint8, the first of two numbers in the low half
    NAME_scales (experts, out, in / 32) uint8, the exponent plus 127

The matrix keeps the name `NAME_blocks`: (experts, out, in), while `NAME` alone would be (experts, in, out) in files that are not
quantized.
"""

from __future__ import annotations

import torch

from tonle.models.layers import Quantized, Weight
from tonle.models.load.quantized.form import Form, Parts
from tonle.models.load.quantized.unpack import unpack_halves
from tonle.models.weights import Shape

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLE = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])


class MXFP4(Form):
    markers = ("_blocks",)
    suffixes = ("_blocks", "_scales")
    whole = "_blocks"

    def shape(self, parts: Parts) -> Shape:
        *outer, groups, half = parts.shape("_blocks")
        return *outer, groups * half * 2

    def read(self, parts: Parts) -> Weight:
        return mxfp4(parts.octets("_blocks"), parts.octets("_scales"))


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Quantized:
    """blocks (..., groups, 16) and scales (..., groups), both uint8 -> numbers (..., in), scale (..., groups)."""
    if scales.shape != blocks.shape[:-1]:
        raise ValueError(f"scales of shape {tuple(scales.shape)} for blocks of shape {tuple(blocks.shape)}")
    scale = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    return Quantized(unpack_halves(blocks).flatten(-2), scale, table=TABLE, bits=4)
