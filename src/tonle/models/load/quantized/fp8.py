"""FP8: matrices of 8-bit floats (e4m3) with a scale for the whole matrix, for each output, or for each block.

    weight (out, in) float8_e4m3fn; weight_scale or weight_scale_inv: () or (1,), (out,) or (out, 1), (out / 128, in / 128)

In spite of its name, weights are multiplied with `weight_scale_inv`, too.
"""

from __future__ import annotations

import torch

from tonle.errors import ModelError
from tonle.models.layers import Quantized, Weight
from tonle.models.load.quantized.form import Form, Parts
from tonle.models.load.quantized.unpack import spread
from tonle.models.weights import Shape


class FP8(Form):
    markers = (".weight_scale_inv", ".weight_scale")
    suffixes = (".weight", ".weight_scale_inv", ".weight_scale", ".weight_scale_ub", ".input_scale_ub")

    def __init__(self, *, block: tuple[int, int] | None) -> None:
        self._block = block

    def shape(self, parts: Parts) -> Shape:
        return parts.shape(".weight")

    def read(self, parts: Parts) -> Weight:
        scale = parts.floats(".weight_scale_inv" if ".weight_scale_inv" in parts else ".weight_scale")
        return scaled_floats(parts[".weight"], scale, self._block)


def scaled_floats(numbers: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> Quantized:
    """numbers (out, in) float8_e4m3fn; scale as stored."""
    if numbers.dtype != torch.float8_e4m3fn:
        raise ModelError(f"8-bit weights of type {numbers.dtype} are not supported; supported: float8_e4m3fn")
    return Quantized(numbers, spread(scale, numbers.shape, block))
