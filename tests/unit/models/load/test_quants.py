"""Unpacking against the reference implementation, bit by bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tonle.models.gguf_file import GGMLType, GGUFTensor
from tonle.models.load.quants import SUPPORTED, dequantize


def stored(type_: GGMLType, rows: int, columns: int) -> GGUFTensor:
    """Random blocks: any bytes are valid, as long as the half-precision scales among them are finite."""
    block_numbers, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(type_))]
    rng = np.random.default_rng(int(type_))
    data = rng.integers(0, 256, (rows * columns // block_numbers, block_bytes), dtype=np.uint8)
    if block_numbers == 1:
        data = rng.standard_normal(rows * columns).astype("<f4").view("<u4")
        data = {4: data, 2: data >> 16}[block_bytes].astype(f"<u{block_bytes}") & np.array(0xBFFFBFFF, "<u4").astype(
            f"<u{block_bytes}"
        )
    else:
        scales = {GGMLType.Q4_1: [1, 3], GGMLType.Q4_K: [1, 3], GGMLType.Q5_K: [1, 3], GGMLType.Q6_K: [209]}
        data[:, scales.get(type_, [1])] &= 0xBF  # high bytes of the scales: exponents below infinity's
    return GGUFTensor("t", (rows, columns), type_, data.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("type_", SUPPORTED, ids=lambda type_: type_.name)
def test_equals_the_reference(type_: GGMLType) -> None:
    tensor = stored(type_, rows=6, columns=512)
    ours = dequantize(tensor)
    theirs = gguf.quants.dequantize(tensor.data.reshape(6, -1), gguf.GGMLQuantizationType(int(type_)))
    assert ours.shape == (6, 512) and np.isfinite(ours).all()
    np.testing.assert_array_equal(ours.astype(np.float32), theirs)
