"""Stored weights are read exactly: every number equals the reference's."""

from __future__ import annotations

import numpy as np
import pytest

from tonle.models.cpu.stored import Stored, from_floats, from_gguf, join
from tonle.models.gguf_file import GGMLType, GGUFTensor
from tonle.models.load.quants import dequantize

FORMS = {  # what a type becomes, and where in a block its half-precision scale and minimum are
    GGMLType.Q4_0: (np.uint8, 0, None), GGMLType.Q4_1: (np.uint8, 0, 2), GGMLType.Q4_K: (np.uint8, 0, 2),
    GGMLType.Q8_0: (np.int8, 0, None), GGMLType.Q5_0: (np.int8, 0, None), GGMLType.Q5_1: (np.int8, 0, 2),
    GGMLType.Q5_K: (np.int8, 0, 2), GGMLType.Q3_K: (np.int8, 108, None), GGMLType.IQ4_NL: (np.int8, 0, None),
    GGMLType.IQ4_XS: (np.int8, 0, None), GGMLType.Q6_K: (np.float32, 208, None), GGMLType.Q2_K: (np.float32, 80, 82),
}  # fmt: skip


def tensor(kind: GGMLType, rows: int = 6, columns: int = 512, seed: int = 0) -> GGUFTensor:
    """Random stored bytes with sane scales."""
    _, scale_at, minimum_at = FORMS[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // kind.block_numbers, kind.block_bytes), dtype=np.uint8)
    scale = (rng.random(len(blocks)) * 0.1).astype(np.float16)
    blocks[:, scale_at : scale_at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if minimum_at is not None:
        blocks[:, minimum_at : minimum_at + 2] = (-scale).view(np.uint8).reshape(-1, 2)
    return GGUFTensor("t", (rows, columns), kind, blocks.reshape(-1))


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_numbers_equal_the_reference(kind: GGMLType) -> None:
    stored = tensor(kind)
    ours = from_gguf(stored)
    np.testing.assert_array_equal(ours.floats(), dequantize(stored))
    assert ours.numbers.dtype == FORMS[kind][0]


def test_floats_stay_what_they_were() -> None:
    values = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    assert np.array_equal(from_floats(values).floats(), values) and from_floats(values).numbers.dtype == np.float32
    rounded = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    short = from_floats(rounded)
    assert short.numbers.dtype == np.uint16 and np.array_equal(short.floats(), rounded)


@pytest.mark.parametrize(
    ("kinds", "narrowest"),
    [((GGMLType.Q4_1, GGMLType.Q4_0), np.uint8), ((GGMLType.Q4_1, GGMLType.Q8_0), np.int8),
     ((GGMLType.Q4_1, GGMLType.Q6_K), np.float32)],
)  # fmt: skip
def test_joining_widens_without_loss(kinds: tuple[GGMLType, ...], narrowest: type) -> None:
    parts = [from_gguf(tensor(kind, seed=i)) for i, kind in enumerate(kinds)]
    whole = join(parts)
    assert whole.numbers.dtype == narrowest
    np.testing.assert_array_equal(whole.floats(), np.concatenate([part.floats() for part in parts]))


def test_taking_rows_keeps_their_scales() -> None:
    stored = from_gguf(tensor(GGMLType.Q4_1))
    order = np.array([5, 0, 3])
    np.testing.assert_array_equal(stored.take(order).floats(), stored.floats()[order])
    assert isinstance(stored.take(order), Stored)
