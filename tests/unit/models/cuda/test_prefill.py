"""Attention of prompts against torch: cached prefixes, several tiles per row, windows, one loop over keys or two."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tonle.models.cuda import prefill
from tonle.models.cuda.batch import TILE_TOKENS, Count, Sizes, StepBuffer
from tonle.models.cuda.fp8 import LARGEST
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


@pytest.mark.parametrize("keys", [16, 32])
@pytest.mark.parametrize(("window", "twice", "eight"), [
    (None, False, False), (None, True, False), (20, False, False), (None, True, True), (20, False, True),
])  # fmt: skip
def test_every_query_sees_what_it_may(
    window: int | None, twice: bool, eight: bool, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_EXACT", prefill.Cut(keys, warps=4, twice=twice))
    rng = torch.Generator().manual_seed(keys)
    batch = StepBuffer(Sizes(max_rows=4, max_tokens=300, max_updates=1, max_items=1), device=torch.device("cpu"))
    width = 20
    tables = torch.randperm(4 * width, generator=rng).view(4, width).int()
    caches = [torch.full((4 * width, BLOCK, KV_HEADS, D), torch.nan) for _ in range(2)]  # read no further than contexts
    sizes = [torch.full((4 * width, KV_HEADS, BLOCK), torch.nan) for _ in range(2)]  # of eight bits
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
        for cache, size_of, values in zip(caches, sizes, own, strict=True):
            block, offset = tables[row, place // BLOCK].long(), place % BLOCK
            if eight:
                values *= torch.logspace(-1, 1, len(values))[:, None, None] if cache is caches[1] else 1.0
                largest = values.abs().amax(-1)  # (n, kv heads)
                stretched = (values / largest[..., None] * LARGEST).to(torch.float8_e4m3fn).float()
                values.copy_(stretched * largest[..., None] / LARGEST)
                size_of[block, :, offset] = largest
                cache[block, offset] = stretched
            else:
                cache[block, offset] = values
        expected.append(reference(qkv[begin : begin + size, :HEADS], *own, start, window))
        begin += size
    batch["counts"][Count.TILES] = tiles
    out = torch.full((num_tokens, HEADS, D), torch.nan)
    if eight:
        cache = LayerCache(*(numbers.to(torch.float8_e4m3fn) for numbers in caches), *sizes)
    else:
        cache = LayerCache(*caches)
    prefill.prefill_attention(batch, tables, qkv, cache, out, tiles=tiles + 2, num_heads=HEADS, window=window)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)
