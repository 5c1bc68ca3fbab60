"""Unpacking against the reference implementation, bit by bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tonle.models.gguf_file import GGMLType, GGUFTensor
from tonle.models.load.quants import SUPPORTED, dequantize

# High bytes of the half-precision scales in a block; with their top exponent bit cleared, all scales are finite.
SCALES = {
    GGMLType.Q8_0: [1],
    GGMLType.Q4_0: [1],
    GGMLType.Q4_1: [1, 3],
    GGMLType.Q5_0: [1],
    GGMLType.Q5_1: [1, 3],
    GGMLType.Q2_K: [81, 83],
    GGMLType.Q3_K: [109],
    GGMLType.Q4_K: [1, 3],
    GGMLType.Q5_K: [1, 3],
    GGMLType.Q6_K: [209],
    GGMLType.IQ4_NL: [1],
    GGMLType.IQ4_XS: [1],
    GGMLType.MXFP4: [0],
}


def stored(type_: GGMLType, rows: int, columns: int) -> GGUFTensor:
    """Random numbers for plain types, random blocks for the others: any bytes are a valid block."""
    quant = gguf.GGMLQuantizationType(int(type_))
    rng = np.random.default_rng(int(type_))
    if type_ not in SCALES:
        data = gguf.quants.quantize(rng.standard_normal((rows, columns)).astype(np.float32), quant)
    else:
        block_numbers, block_bytes = gguf.GGML_QUANT_SIZES[quant]
        data = rng.integers(0, 256, (rows * columns // block_numbers, block_bytes), dtype=np.uint8)
        data[:, SCALES[type_]] &= 0xBF
    return GGUFTensor("t", (rows, columns), type_, data.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("type_", SUPPORTED, ids=lambda type_: type_.name)
def test_equals_the_reference(type_: GGMLType) -> None:
    tensor = stored(type_, rows=6, columns=512)
    ours = dequantize(tensor)
    theirs = gguf.quants.dequantize(tensor.data.reshape(6, -1), gguf.GGMLQuantizationType(int(type_)))
    assert ours.shape == (6, 512) and np.isfinite(ours).all()
    np.testing.assert_array_equal(ours.astype(np.float32), theirs)
