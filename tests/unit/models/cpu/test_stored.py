"""Stored weights are read exactly: every number equals the reference's."""

from __future__ import annotations

import numpy as np
import pytest

from tonle.models.cpu.stored import Stored, from_floats, from_gguf, join
from tonle.models.gguf_file import GGMLType, GGUFTensor
from tonle.models.load.quants import dequantize

BLOCK_BYTES = {GGMLType.Q4_0: (32, 18), GGMLType.Q4_1: (32, 20), GGMLType.Q8_0: (32, 34), GGMLType.Q4_K: (256, 144),
               GGMLType.Q6_K: (256, 210)}  # fmt: skip


def tensor(kind: GGMLType, rows: int = 6, columns: int = 512, seed: int = 0) -> GGUFTensor:
    """Random stored bytes with sane scales."""
    numbers, size = BLOCK_BYTES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // numbers, size), dtype=np.uint8)
    scale = (rng.random(len(blocks)) * 0.1).astype(np.float16)
    at = size - 2 if kind is GGMLType.Q6_K else 0
    blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if kind in (GGMLType.Q4_1, GGMLType.Q4_K):
        blocks[:, 2:4] = (-scale).view(np.uint8).reshape(-1, 2)
    return GGUFTensor("t", (rows, columns), kind, blocks.reshape(-1))


@pytest.mark.parametrize("kind", list(BLOCK_BYTES))
def test_numbers_equal_the_reference(kind: GGMLType) -> None:
    stored = tensor(kind)
    ours = from_gguf(stored)
    reference = dequantize(stored).reshape(ours.shape)
    np.testing.assert_allclose(ours.floats(), reference, rtol=1e-6, atol=1e-7)
    narrow = {GGMLType.Q8_0: np.int8, GGMLType.Q6_K: np.float32}.get(kind, np.uint8)
    assert ours.numbers.dtype == narrow


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
