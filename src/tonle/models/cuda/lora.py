# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment,var-annotated"
"""What follows a product with a wide weight: y of every token is there, now B y of the token's own adapter is added.

A wide weight has the A matrices of all slots below its own rows, so one product x @ W.T gives (T, width): the matrix's N
outputs, then y = A x of each slot and module, `RANK` numbers each. The kernels here add B y where the outputs are used next, in
the same pass: `expand` (queries, keys and values; residuals of long prompts), `gate_expand` (gated activation),
`residual_norm` (residuals of few tokens, and the norm that follows).

Tokens of one slot form tiles (`SlotTiles`), so that B is read once per tile and multiplied on tensor cores. `residual_norm`
needs whole tokens; 100 of them would be nine tiles and leave most of the device idle. There a program takes one token and reads
all of B, 48 KB from L2 for 1,536 outputs of rank 16: 1 µs for 100 tokens, but 25 µs for 2,048, so long prompts use `expand` and
a norm. Tokens without an adapter have slot -1. Does not: choose between these (`pieces.py`), or know where tiles come from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tonle.models.cuda.launch import follow, launch

_FEW_NUMBERS = 256 * 16  # y of so many tokens and ranks, at most, go through `residual_norm`
_CHUNK = 512 * 16  # numbers of B that `residual_norm` treats at a time
_AHEAD = 192  # numbers per thread of B that it reads before the kernel ahead has ended, at most


class SlotTiles(NamedTuple):
    """Tokens by the slot of their adapters, int32 on the device."""

    num_tokens: torch.Tensor  # (1,)
    num_tiles: torch.Tensor  # (1,)
    slots: torch.Tensor  # (T,) of each token; -1 = none
    tokens: torch.Tensor  # (T,) all tokens, those of one slot together
    tiles: torch.Tensor  # (3 * tiles,): first place in `tokens`, how many, their slot
    width: int  # most tokens of a tile
    most: int  # most tiles there can be


def few_tokens(rank: int) -> int:
    """Up to so many tokens go through `residual_norm`, more through `expand` and a norm."""
    return _FEW_NUMBERS // rank


@triton.jit
def _tile(NUM_TILES, TILES, TOKENS, BM: tl.constexpr):
    """This program's tokens (BM,), which of them exist, and their slot. Older than the kernel ahead: need not wait."""
    tile = tl.program_id(0)
    here = tile < tl.load(NUM_TILES)
    first = tl.load(TILES + 3 * tile, mask=here, other=0)
    size = tl.load(TILES + 3 * tile + 1, mask=here, other=0)
    slot = tl.load(TILES + 3 * tile + 2, mask=here, other=-1).to(tl.int64)
    i = tl.arange(0, BM)
    return tl.load(TOKENS + first + i, mask=i < size, other=0).to(tl.int64), i < size, slot, here


@triton.jit
def _b_rows(B, slot, n, N: tl.constexpr, R: tl.constexpr):
    """B (slots, N, R) of a slot and outputs `n`; zeros where there is no slot."""
    some = (n < N) & (slot >= 0)
    return tl.load(B + (slot * N + n)[:, None] * R + tl.arange(0, R)[None, :], mask=some[:, None], other=0.0)


@triton.jit
def _by(row, some, slot, module, b, N: tl.constexpr, MODULES: tl.constexpr, R: tl.constexpr, IEEE: tl.constexpr):
    """B y (tokens, outputs) float32; `row` (tokens,) points to the tokens' wide rows."""
    place = row + N + (slot * MODULES + module) * R
    y = tl.load(place[:, None] + tl.arange(0, R)[None, :], mask=(some & (slot >= 0))[:, None], other=0.0)
    if IEEE:
        return tl.dot(y, tl.trans(b), input_precision="ieee")
    else:
        return tl.dot(y, tl.trans(b))


@triton.jit
def _expand(NUM_TILES, TILES, TOKENS, WIDE, B, OUT, N: tl.constexpr, WIDTH: tl.constexpr, SECOND: tl.constexpr,
            THIRD: tl.constexpr, MODULES: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            ADD: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Outputs from SECOND on are those of the second module, from THIRD on of the third; none of them cuts a block."""
    t, some, slot, here = _tile(NUM_TILES, TILES, TOKENS, BM)
    first = tl.program_id(1) * BN
    n = first + tl.arange(0, BN)
    b = _b_rows(B, slot, n, N, R)
    module = (first >= SECOND).to(tl.int64) + (first >= THIRD).to(tl.int64)
    follow(PDL)
    if here:
        stored = some[:, None] & (n < N)[None, :]
        row = WIDE + t * WIDTH
        y = tl.load(row[:, None] + n[None, :], mask=stored, other=0.0).to(tl.float32)
        out = OUT + t[:, None] * N + n[None, :]
        if ADD:
            y += tl.load(out, mask=stored, other=0.0).to(tl.float32)
        y += _by(row, some, slot, module, b, N, MODULES, R, IEEE)
        tl.store(out, y.to(OUT.dtype.element_ty), mask=stored)


def expand(
    tiles: SlotTiles, wide: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, parts: tuple[int, ...],
    add: bool = False,
) -> None:  # fmt: skip
    """out (T, N) = wide[:, :N] + B y, added to what out holds if `add`. wide (T, width), b (slots, N, R).

    `parts`: outputs of each module, one to three of them, that lie side by side in N.
    """
    _, outputs, rank = b.shape
    block = 64
    while any(part % block for part in parts[:-1]):  # no block belongs to two modules
        block //= 2
    second = parts[0] if len(parts) > 1 else outputs
    third = parts[0] + parts[1] if len(parts) > 2 else outputs
    assert block >= 16 and sum(parts) == outputs
    launch(
        _expand, (tiles.most, triton.cdiv(outputs, block)),
        tiles.num_tiles, tiles.tiles, tiles.tokens, wide, b, out, outputs, wide.shape[1], second, third, len(parts), rank,
        tiles.width, block, add, wide.dtype == torch.float32, num_warps=2 if tiles.width * rank <= 16 * 32 else 4,
    )  # fmt: skip


@triton.jit
def _gate_expand(NUM_TILES, TILES, TOKENS, WIDE, B, OUT, SIZE: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    N: tl.constexpr = 2 * SIZE
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    t, some, slot, here = _tile(NUM_TILES, TILES, TOKENS, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    gate_b = _b_rows(B, slot, n, N, R)  # past SIZE they are those of up, which are not stored
    up_b = _b_rows(B, slot, SIZE + n, N, R)
    follow(PDL)
    if here:
        stored = some[:, None] & (n < SIZE)[None, :]
        row = WIDE + t * WIDTH
        place = row[:, None] + n[None, :]
        gate = tl.load(place, mask=stored, other=0.0).to(tl.float32)
        up = tl.load(place + SIZE, mask=stored, other=0.0).to(tl.float32)
        gate = (gate + _by(row, some, slot, 0, gate_b, N, 2, R, IEEE)).to(DTYPE).to(tl.float32)
        up = (up + _by(row, some, slot, 1, up_b, N, 2, R, IEEE)).to(DTYPE).to(tl.float32)
        active = (gate * tl.sigmoid(gate)).to(DTYPE).to(tl.float32)  # rounded where torch rounds
        tl.store(OUT + t[:, None] * SIZE + n[None, :], (active * up).to(DTYPE), mask=stored)


def gate_expand(tiles: SlotTiles, wide: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out (T, size) = silu(gate + B y) * (up + B y). wide (T, width): gate, up, then y; b (slots, 2 * size, R)."""
    size, rank, block = out.shape[1], b.shape[2], 64
    launch(
        _gate_expand, (tiles.most, triton.cdiv(size, block)),
        tiles.num_tiles, tiles.tiles, tiles.tokens, wide, b, out, size, wide.shape[1], rank, tiles.width, block,
        wide.dtype == torch.float32, num_warps=2 if tiles.width * rank <= 16 * 32 else 4,
    )  # fmt: skip


@triton.jit
def _residual_norm(NUM_TOKENS, SLOTS, WIDE, B, HIDDEN, GAIN, OUT, eps, N: tl.constexpr, WIDTH: tl.constexpr,
                   R: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One token. All chunks are unrolled: their reads are under way together, the first of B's before the kernel ahead ends."""
    DTYPE: tl.constexpr = HIDDEN.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    here = t < tl.load(NUM_TOKENS)
    slot = tl.load(SLOTS + t, mask=here, other=-1).to(tl.int64)
    n = tl.arange(0, CHUNK)
    r = tl.arange(0, R)
    bs = ()
    for first in tl.static_range(0, AHEAD * CHUNK, CHUNK):
        bs += (_b_rows(B, slot, first + n, N, R),)
    follow(PDL)
    if here:
        row = WIDE + t * WIDTH
        y = tl.load(row + N + slot * R + r, mask=(r >= 0) & (slot >= 0), other=0.0).to(tl.float32)
        xs = ()
        squares = tl.zeros([CHUNK], tl.float32)
        for first in tl.static_range(0, N, CHUNK):
            some = first + n < N
            x = tl.load(HIDDEN + t * N + first + n, mask=some, other=0.0).to(tl.float32)
            x += tl.load(row + first + n, mask=some, other=0.0).to(tl.float32)
            if first < AHEAD * CHUNK:
                b = bs[first // CHUNK]
            else:
                b = _b_rows(B, slot, first + n, N, R)
            x = (x + tl.sum(b.to(tl.float32) * y[None, :], 1)).to(DTYPE)
            tl.store(HIDDEN + t * N + first + n, x, mask=some)
            squares += x.to(tl.float32) * x.to(tl.float32)
            xs += (x,)
        scale = tl.rsqrt(tl.sum(squares, 0) / N + eps)
        for first in tl.static_range(0, N, CHUNK):
            some = first + n < N
            gain = tl.load(GAIN + first + n, mask=some, other=0.0).to(tl.float32)
            normed = xs[first // CHUNK].to(tl.float32) * scale * gain
            tl.store(OUT + t * N + first + n, normed.to(DTYPE), mask=some)


def residual_norm(
    tiles: SlotTiles, wide: torch.Tensor, b: torch.Tensor, hidden: torch.Tensor, gain: torch.Tensor, eps: float,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """hidden (T, N) += wide[:, :N] + B y, then out (T, N) = its norm. wide (T, N + slots * R), b (slots, N, R)."""
    (tokens, outputs), rank = hidden.shape, b.shape[2]
    warps = 8
    chunk = min(_CHUNK // rank, triton.next_power_of_2(outputs))
    ahead = min(triton.cdiv(outputs, chunk), max(1, _AHEAD * warps * 32 // (chunk * rank)))
    launch(
        _residual_norm, (tokens,),
        tiles.num_tokens, tiles.slots, wide, b, hidden, gain, out, eps, outputs, wide.shape[1], rank, chunk,
        ahead if wide.element_size() == 2 else 1, num_warps=warps,
    )  # fmt: skip
