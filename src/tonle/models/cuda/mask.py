# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Logits of rows that may get only some tokens: a copy with minus infinity where a bit is not set."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.launch import follow, launch

_BLOCK = 4096


@triton.jit
def _mask(PLACES, MASK_ROWS, WORDS, LOGITS, OUT, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    n = tl.program_id(0)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words: tl.constexpr = (V + 31) // 32
    word = tl.load(WORDS + tl.load(MASK_ROWS + n).to(tl.int64) * words + v // 32, mask=v < V, other=0)
    x = tl.load(LOGITS + tl.load(PLACES + n) * V + v, mask=v < V, other=0.0).to(tl.float32)
    x = tl.where(((word >> (v % 32)) & 1) != 0, x, float("-inf"))
    tl.store(OUT + n.to(tl.int64) * V + v, x, mask=v < V)


@triton.jit
def _put(COUNT, PLACES, DRAWN, SAMPLED, ROWS: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    n = tl.arange(0, ROWS)
    real = n < tl.load(COUNT)
    tl.store(SAMPLED + tl.load(PLACES + n, mask=real, other=0), tl.load(DRAWN + n, mask=real, other=0), mask=real)


def put_drawn(count: torch.Tensor, places: torch.Tensor, drawn: torch.Tensor, sampled: torch.Tensor) -> None:
    """sampled[places[i]] = drawn[i] for the first `count[0]`. places (n,) int64, n a power of two; the others int32."""
    launch(_put, (1,), count, places, drawn, sampled, len(places), num_warps=1)


def mask_logits(
    places: torch.Tensor, mask_rows: torch.Tensor, words: torch.Tensor, logits: torch.Tensor, out: torch.Tensor
) -> None:
    """out[i] = logits[places[i]] where words[mask_rows[i]] has the token's bit, elsewhere minus infinity.

    places (n,) int64; mask_rows (n,) int32; words (masks, ceil(V / 32)) int32, lowest bits first; logits (S, V);
    out (n, V) float32.
    """
    count, vocab = out.shape
    launch(
        _mask, (count, triton.cdiv(vocab, _BLOCK)), places, mask_rows, words, logits, out, vocab, _BLOCK, num_warps=8
    )
