"""Attention of prompts against torch: cached prefixes, several tiles per row, windows, one loop over keys or two."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tonle.models.cuda import prefill
from tonle.models.cuda.batch import TILE_TOKENS, Count, Sizes, StepBuffer

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


@pytest.mark.parametrize("keys", [16, 32])
@pytest.mark.parametrize(("window", "twice"), [(None, False), (None, True), (20, False)])
def test_every_query_sees_what_it_may(
    window: int | None, twice: bool, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_EXACT", prefill.Cut(keys, warps=4, twice=twice))
    rng = torch.Generator().manual_seed(keys)
    batch = StepBuffer(Sizes(max_rows=4, max_tokens=300, max_updates=1, max_items=1), device=torch.device("cpu"))
    width = 20
    tables = torch.randperm(4 * width, generator=rng).view(4, width).int()
    caches = [
        torch.full((4 * width, BLOCK, KV_HEADS, D), torch.nan) for _ in range(2)
    ]  # beyond a context nothing is read
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
        for cache, values in zip(caches, own, strict=True):
            cache[tables[row, place // BLOCK].long(), place % BLOCK] = values
        expected.append(reference(qkv[begin : begin + size, :HEADS], *own, start, window))
        begin += size
    batch["counts"][Count.TILES] = tiles
    out = torch.full((num_tokens, HEADS, D), torch.nan)
    prefill.prefill_attention(batch, tables, qkv, *caches, out, tiles=tiles + 2, num_heads=HEADS, window=window)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)
