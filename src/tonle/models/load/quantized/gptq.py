"""GPTQ: words along the inputs, zero points in words along the outputs.

    qweight (in * bits / 32, out) int32, qzeros (groups, out * bits / 32) int32, scales (groups, out) float16, g_idx (in,) int32
    weight = (number - zero) * scale of its group

Files in the first version store zero - 1, in the second (`gptq_v2`) zero. `g_idx` names the group of each input; with act-order
(`desc_act`) groups are not contiguous.
"""

from __future__ import annotations

from tonle.models.layers import Weight
from tonle.models.load.quantized.form import Form, Parts
from tonle.models.load.quantized.unpack import in_groups, unpack_words, wanted_bits, with_zero_points
from tonle.models.weights import Shape


class GPTQ(Form):
    markers = (".qweight",)
    suffixes = (".qweight", ".qzeros", ".scales", ".g_idx")

    def __init__(self, *, zero_offset: int) -> None:
        self._zero_offset = zero_offset  # what stored zero points lack

    def shape(self, parts: Parts) -> Shape:
        bits = self._bits(parts)
        return parts.shape(".scales")[1], parts.shape(".qweight")[0] * 32 // bits

    def read(self, parts: Parts) -> Weight:
        bits, scales = self._bits(parts), parts.floats(".scales")
        zeros = unpack_words(parts.words(".qzeros"), bits).int()  # (groups, out)
        zeros = (zeros + self._zero_offset) & (2**bits - 1)
        numbers = unpack_words(parts.words(".qweight").t(), bits)  # (out, in)
        return in_groups(with_zero_points(numbers, scales.t(), zeros.t(), bits), parts.find(".g_idx"))

    @staticmethod
    def _bits(parts: Parts) -> int:
        """From the shapes: a checkpoint may have several."""
        return wanted_bits(32 * parts.shape(".qzeros")[1] // parts.shape(".scales")[1], (4, 8), "GPTQ")
