"""compressed-tensors: what llm-compressor writes, and `tonle quantize`.

    pack-quantized  weight_packed (out, in * bits / 32) int32, numbers with 8 or 128 added; weight_shape (2,);
                    weight_scale (out, groups); weight_zero_point (out * bits / 32, groups) int32, where not symmetric;
                    weight_g_idx (in,), where groups are not contiguous
    int-quantized   weight (out, in) int8; weight_scale; weight_zero_point like weight_scale, int8
    float-quantized weight (out, in) float8_e4m3fn; weight_scale

A scale may be one for the whole matrix, for each output, each group of inputs, or each block.
"""

from __future__ import annotations

import torch

from tonle.models.layers import Quantized, Weight
from tonle.models.load.quantized.form import Form, Parts
from tonle.models.load.quantized.fp8 import scaled_floats
from tonle.models.load.quantized.unpack import in_groups, spread, unpack_words, wanted_bits, with_zero_points
from tonle.models.weights import Shape


class CompressedTensors(Form):
    markers = (".weight_packed", ".weight_scale")
    suffixes = (".weight", ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")

    def __init__(self, *, block: tuple[int, int] | None) -> None:
        self._block = block

    def shape(self, parts: Parts) -> Shape:
        if ".weight_packed" not in parts:
            return parts.shape(".weight")
        outputs, inputs = (int(size) for size in parts[".weight_shape"].tolist())
        return outputs, inputs

    def read(self, parts: Parts) -> Weight:
        if ".weight_packed" in parts:
            return self._packed(parts)
        numbers, scale = parts[".weight"], parts.floats(".weight_scale")
        if numbers.dtype != torch.int8:
            return scaled_floats(numbers, scale, self._block)
        scale = spread(scale, numbers.shape, self._block)
        zero = parts.find(".weight_zero_point")
        if zero is None or not zero.any():
            return in_groups(Quantized(numbers, scale), parts.find(".weight_g_idx"))
        minimum = spread(zero, numbers.shape, self._block).float() * -scale.float()
        return in_groups(Quantized(numbers, scale, minimum), parts.find(".weight_g_idx"))

    def _packed(self, parts: Parts) -> Weight:
        words = parts.words(".weight_packed")
        outputs, inputs = self.shape(parts)
        bits = wanted_bits(32 * words.shape[1] // inputs, (4, 8), "compressed-tensors")
        numbers = unpack_words(words, bits)[:, :inputs].contiguous()
        scale = spread(parts.floats(".weight_scale"), numbers.shape)
        zero = torch.full_like(scale, 2 ** (bits - 1))  # the packed numbers' own
        if ".weight_zero_point" in parts:
            zero = unpack_words(parts.words(".weight_zero_point").t(), bits).t()[:outputs]
        return in_groups(with_zero_points(numbers, scale, zero, bits), parts.find(".weight_g_idx"))
