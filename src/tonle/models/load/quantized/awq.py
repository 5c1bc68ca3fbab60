"""AWQ, in the layout called GEMM: words along the outputs, eight 4-bit numbers each.

qweight (in, out / 8) int32, qzeros (groups, out / 8) int32, scales (groups, out) float16; weight = (number - zero) * scale
"""

from __future__ import annotations

import torch

from tonle.models.layers import Weight
from tonle.models.load.quantized.form import Form, Parts
from tonle.models.load.quantized.unpack import in_groups, unpack_words, wanted_bits, with_zero_points
from tonle.models.weights import Shape

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the numbers of eight outputs stand


class AWQ(Form):
    markers = (".qweight",)
    suffixes = (".qweight", ".qzeros", ".scales")

    def shape(self, parts: Parts) -> Shape:
        return parts.shape(".scales")[1], parts.shape(".qweight")[0]

    def read(self, parts: Parts) -> Weight:
        scales = parts.floats(".scales")
        wanted_bits(32 * parts.shape(".qweight")[1] // scales.shape[1], (4,), "AWQ")
        zeros = _natural(parts.words(".qzeros"))
        return in_groups(with_zero_points(_natural(parts.words(".qweight")), scales.t(), zeros, 4), None)


def _natural(words: torch.Tensor) -> torch.Tensor:
    """(n, out / 8) int32 -> (out, n), outputs in their order."""
    numbers = unpack_words(words, 4).view(len(words), -1, 8)
    return numbers[:, :, torch.tensor(_PLACES)].flatten(1).t().contiguous()
