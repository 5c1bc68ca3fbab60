"""Attention of prompts against torch: cached prefixes, several tiles per row, windows, one loop over keys or two."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tonle.models.cuda import prefill_attention
from tonle.models.cuda.batch import TILE_TOKENS, Count, Sizes, StepBuffer
from tonle.models.inputs import LayerCache

HEADS, KV_HEADS, D, BLOCK = 4, 2, 16, 8
ROWS = [(0, 5), (37, 90), (16, 64), (3, 130)]  # tokens in the cache, tokens of this step


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    """q (n, heads, D) at positions start ..; k, v (start + n, kv heads, D)."""
    position, key = start + torch.arange(len(q))[:, None], torch.arange(len(k))[None, :]
    seen = key <= position
    if window is not None:
        seen &= key > position - window
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=seen).transpose(0, 1)


def packed(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., D) as e4m3 holds them, in their own type, and scales (...)."""
    scales = torch.exp2(values.abs().amax(-1).log2().floor() - 7)
    return (values / scales[..., None]).to(torch.float8_e4m3fn).to(values.dtype), scales


@pytest.mark.parametrize("keys", [16, 32])
@pytest.mark.parametrize(("window", "twice", "eight"), [
    (None, False, False), (None, True, False), (20, False, False), (None, True, True), (20, False, True),
])  # fmt: skip
def test_every_query_sees_what_it_may(
    window: int | None, twice: bool, eight: bool, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_attention, "_EXACT", prefill_attention.PrefillTiling(keys, warps=4, twice=twice))
    rng = torch.Generator().manual_seed(keys)
    batch = StepBuffer(Sizes(max_rows=4, max_tokens=300, max_updates=1, max_items=1), device=torch.device("cpu"))
    width = 20
    tables = torch.randperm(4 * width, generator=rng).view(4, width).int()
    caches = [torch.full((4 * width, BLOCK, KV_HEADS, D), torch.nan) for _ in range(2)]  # read no further than contexts
    scales = [torch.full((4 * width, KV_HEADS, BLOCK), torch.nan) for _ in range(2)]  # of eight bits
    num_tokens = sum(size for _, size in ROWS)
    qkv = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, D, generator=rng)
    begin, tiles, expected = 0, 0, []
    for row, (start, size) in enumerate(ROWS):
        for name, value in (("rows", row), ("starts", start), ("row_begins", begin), ("row_sizes", size)):
            batch[name][row] = value
        for first in range(0, size, TILE_TOKENS):
            batch["tile_rows"][tiles], batch["tile_firsts"][tiles] = row, first
            tiles += 1
        own = [torch.randn(start + size, KV_HEADS, D, generator=rng) for _ in range(2)]
        place = torch.arange(start + size)
        for cache, scale_of, values in zip(caches, scales, own, strict=True):
            block, offset = tables[row, place // BLOCK].long(), place % BLOCK
            if eight:
                values *= torch.logspace(-1, 1, len(values))[:, None, None] if cache is caches[1] else 1.0
                cache[block, offset], scale_of[block, :, offset] = packed(values)
                values.copy_(cache[block, offset] * scale_of[block, :, offset][..., None])
            else:
                cache[block, offset] = values
        expected.append(reference(qkv[begin : begin + size, :HEADS], *own, start, window))
        begin += size
    batch["counts"][Count.TILES] = tiles
    out = torch.full((num_tokens, HEADS, D), torch.nan)
    if eight:
        cache = LayerCache(*(numbers.to(torch.float8_e4m3fn) for numbers in caches), *scales)
    else:
        cache = LayerCache(*caches)
    prefill_attention.prefill_attention(batch, tables, qkv, cache, out, tiles=tiles + 2, num_heads=HEADS, window=window)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("q_size", "k_size", "v_size"), [(1e5, 1e-5, 1e5), (1e-8, 1e8, 1e-7), (1.0, 1.0, 1.0)])
def test_half_precision_holds_eight_bits_of_any_size(q_size: float, k_size: float, v_size: float) -> None:
    """And a first key that takes nearly all the weight, with a value of nearly nothing, does not hide the others."""
    rng = torch.Generator().manual_seed(0)
    tokens = 100
    q = torch.randn(tokens, HEADS, D, generator=rng)
    k = torch.randn(tokens, KV_HEADS, D, generator=rng)
    v = torch.randn(tokens, KV_HEADS, D, generator=rng) * v_size
    q[:, :, 0], k[:, :, 0] = 6.0, 0.0
    k[0, :, 0], v[0] = 10.0, v[0] * 1e-6  # e**15 times the others' weight
    q, k = (q * q_size).bfloat16().float(), k * k_size
    batch = StepBuffer(Sizes(max_rows=1, max_tokens=tokens, max_updates=1, max_items=1), device=torch.device("cpu"))
    batch["row_sizes"][0], batch["counts"][Count.TILES] = tokens, 2
    batch["tile_firsts"][:2] = torch.tensor([0, TILE_TOKENS])
    num_blocks = -(-tokens // BLOCK)
    numbers, scales = [], []
    for x in (k, v):
        own, scale = packed(x)
        x.copy_(own * scale[..., None])
        own, scale = (
            torch.nn.functional.pad(y.flatten(1), (0, 0, 0, num_blocks * BLOCK - tokens)) for y in (own, scale)
        )
        numbers.append(own.view(num_blocks, BLOCK, KV_HEADS, D).to(torch.float8_e4m3fn))
        scales.append(scale.view(num_blocks, BLOCK, KV_HEADS).transpose(1, 2).contiguous())
    qkv = torch.zeros(tokens, HEADS + 2 * KV_HEADS, D, dtype=torch.bfloat16)
    qkv[:, :HEADS] = q.bfloat16()
    out = torch.full((tokens, HEADS, D), torch.nan, dtype=torch.bfloat16)
    tables = torch.arange(num_blocks, dtype=torch.int32)[None, :]
    prefill_attention.prefill_attention(
        batch, tables, qkv, LayerCache(*numbers, *scales), out, tiles=2, num_heads=HEADS, window=None
    )
    expected = reference(q.double(), k.double(), v.double(), 0, None).float()
    off = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(off[1:].max()) < 0.05, "of each query; the interpreter cuts bfloat16 where a GPU rounds"


def test_launched_with_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode attention does not wait for the kernel before this one, so this one must run: an empty grid would not."""
    grids = []
    monkeypatch.setattr(prefill_attention, "launch", lambda _, grid, *arguments, **options: grids.append(grid))
    batch = StepBuffer(Sizes(max_rows=4, max_tokens=8, max_updates=1, max_items=1), device=torch.device("cpu"))
    cache = LayerCache(*(torch.zeros(2, BLOCK, KV_HEADS, D) for _ in range(2)), None, None)
    qkv, tables = torch.zeros(4, HEADS + 2 * KV_HEADS, D), torch.zeros(4, 1, dtype=torch.int32)
    prefill_attention.prefill_attention(batch, tables, qkv, cache, qkv, tiles=0, num_heads=HEADS, window=None)
    assert grids == [(HEADS, 1)]
