"""Blocks leave one cache as bytes and are the same in another, whatever numbers they are made of."""

from __future__ import annotations

import pytest
import torch

from tonle.engine.kv.block_copies import BlockCopies
from tonle.models.inputs import KVCache

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def _cache(dtype: torch.dtype, *, num_blocks: int, filled: bool, device: str = "cpu") -> KVCache:
    kv = KVCache(num_layers=3, num_blocks=num_blocks, block_size=4, num_kv_heads=2, head_dim=8, dtype=dtype,
                 device=torch.device(device))  # fmt: skip
    for part in (kv.k, kv.v, kv.k_scales, kv.v_scales) if filled else ():
        if part is not None:
            part.copy_(torch.randn(part.shape).mul(20).to(part.dtype))
    return kv


def _bits(part: torch.Tensor | None, block: int) -> bytes:
    return b"" if part is None else part[:, block].contiguous().view(torch.uint8).cpu().numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_the_same_elsewhere(dtype: torch.dtype) -> None:
    check_copies(dtype, "cpu")


def check_copies(dtype: torch.dtype, device: str) -> None:
    one, other = (_cache(dtype, num_blocks=n, filled=n == 5, device=device) for n in (5, 7))
    copies = BlockCopies(one)
    data = copies.read([4, 0, 2])
    assert data.shape == (3, copies.block_bytes) and data.device.type == "cpu"
    BlockCopies(other).write([1, 6, 3], data)
    for source, target in ((4, 1), (0, 6), (2, 3)):
        for name in ("k", "v", "k_scales", "v_scales"):
            assert _bits(getattr(one, name), source) == _bits(getattr(other, name), target)
    for untouched in (0, 2, 4, 5):
        assert not any(_bits(other.k, untouched))


def test_bytes_of_another_size_are_refused() -> None:
    copies = BlockCopies(_cache(torch.float32, num_blocks=2, filled=False))
    with pytest.raises(AssertionError):
        copies.write([0, 1], torch.zeros((1, copies.block_bytes), dtype=torch.uint8))
