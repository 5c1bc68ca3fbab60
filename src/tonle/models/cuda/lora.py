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

from tonle.models.cuda.activation import activated, gate_of
from tonle.models.cuda.launch import follow, launch, read
from tonle.models.spec import Activation

# `benchmarks.gpu_adapters steps --variants` compares other values of these.
FEW_NUMBERS = 768 * 16  # y of so many tokens and ranks, at most, go through `residual_norm`
NORM_CHUNK = 512 * 16  # numbers of B that `residual_norm` treats at a time
NORM_WARPS = 8
NORM_FEW_TOKENS = (
    128  # up to so many, every program has a multiprocessor for itself: more at a time, and twice the warps
)
NORM_FEW_CHUNK = 2048 * 16
NORM_AHEAD = 192  # numbers per thread of B that it reads before the kernel ahead has ended, at most
EXPAND_BLOCK = 64  # outputs of a program
EXPAND_WARPS = 2  # of narrow tiles; wide ones have twice as many
GATE_BLOCK = 128
GATE_WARPS = 4


class SlotTiles(NamedTuple):
    """Tokens by the slot of their adapters, int32 on the device."""

    slots: torch.Tensor  # (T,) of each token; -1 = none; also past the last token
    tiles: (
        torch.Tensor
    )  # (tiles * (1 + width),): a slot, then its tokens; -1 past the last token, and past the last tile
    width: int  # most tokens of a tile
    most: int  # most tiles there can be


def few_tokens(rank: int) -> int:
    """Up to so many tokens go through `residual_norm`, more through `expand` and a norm."""
    return FEW_NUMBERS // rank


@triton.jit
def _tile(TILES, BM: tl.constexpr):
    """This program's tokens (BM,), which of them exist, their slot, and whether there are any.

    Older than the kernel ahead: need not wait. All in one round of reads: each further one takes half a microsecond.
    """
    tile = TILES + tl.program_id(1) * (1 + BM)
    t = tl.load(tile + 1 + tl.arange(0, BM))
    slot = tl.load(tile).to(tl.int64)
    return tl.maximum(t, 0).to(tl.int64), t >= 0, slot, tl.load(tile + 1) >= 0


@triton.jit
def _b_rows(B, slot, n, N: tl.constexpr, R: tl.constexpr):
    """B (slots, N, R) of a slot and outputs `n`; zeros where there is no slot."""
    some = (n < N) & (slot >= 0)
    return tl.load(B + (slot * N + n)[:, None] * R + tl.arange(0, R)[None, :], mask=some[:, None], other=0.0)


@triton.jit
def _y_of(row, some, slot, module, N: tl.constexpr, MODULES: tl.constexpr, R: tl.constexpr):
    """y (tokens, R) of a module; `row` (tokens,) points to the tokens' wide rows."""
    place = row + N + (slot * MODULES + module) * R
    return tl.load(place[:, None] + tl.arange(0, R)[None, :], mask=(some & (slot >= 0))[:, None], other=0.0)


@triton.jit
def _by(y, b, IEEE: tl.constexpr):
    """B y (tokens, outputs) float32."""
    if IEEE:
        return tl.dot(y, tl.trans(b), input_precision="ieee")
    else:
        return tl.dot(y, tl.trans(b))


@triton.jit
def _expand(TILES, WIDE, B, OUT, N: tl.constexpr, WIDTH: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
            MODULES: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ADD: tl.constexpr,
            IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Outputs from SECOND on are those of the second module, from THIRD on of the third; none of them cuts a block."""
    t, some, slot, here = _tile(TILES, BM)
    first = tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    stored = some[:, None] & (n < N)[None, :]
    out = OUT + t[:, None] * N + n[None, :]
    b = _b_rows(B, slot, n, N, R)
    if ADD:
        before = tl.load(out, mask=stored, other=0.0)  # the kernel ahead is the product: it does not write these
    module = (first >= SECOND).to(tl.int64) + (first >= THIRD).to(tl.int64)
    follow(PDL)
    if here:
        row = WIDE + t * WIDTH
        y = _y_of(row, some, slot, module, N, MODULES, R)
        x = tl.load(row[:, None] + n[None, :], mask=stored, other=0.0)
        tl.debug_barrier()  # all reads are under way
        b, y = read(b, PDL), read(y, PDL)
        x = read(x, PDL).to(tl.float32)
        if ADD:
            x += read(before, PDL).to(tl.float32)
        tl.store(out, (x + _by(y, b, IEEE)).to(OUT.dtype.element_ty), mask=stored)


def expand(
    tiles: SlotTiles, wide: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, parts: tuple[int, ...],
    add: bool = False,
) -> None:  # fmt: skip
    """out (T, N) = wide[:, :N] + B y, added to what out holds if `add`. wide (T, width), b (slots, N, R).

    `parts`: outputs of each module, one to three of them, that lie side by side in N.
    """
    _, outputs, rank = b.shape
    block = EXPAND_BLOCK
    while any(part % block for part in parts[:-1]):  # no block belongs to two modules
        block //= 2
    second = parts[0] if len(parts) > 1 else outputs
    third = parts[0] + parts[1] if len(parts) > 2 else outputs
    assert block >= 16 and sum(parts) == outputs
    launch(
        _expand, (triton.cdiv(outputs, block), tiles.most),
        tiles.tiles, wide, b, out, outputs, wide.shape[1], second, third, len(parts), rank, tiles.width, block, add,
        wide.dtype == torch.float32, num_warps=_warps(EXPAND_WARPS, tiles, rank),
    )  # fmt: skip


def _warps(narrow: int, tiles: SlotTiles, rank: int) -> int:
    return narrow if tiles.width * rank <= 16 * 32 else 2 * narrow


@triton.jit
def _gate_expand(TILES, WIDE, B, OUT, SIZE: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, BM: tl.constexpr,
                 BN: tl.constexpr, GLU: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    N: tl.constexpr = 2 * SIZE
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    t, some, slot, here = _tile(TILES, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    gate_b = _b_rows(B, slot, n, N, R)  # past SIZE they are those of up, which are not stored
    up_b = _b_rows(B, slot, SIZE + n, N, R)
    follow(PDL)
    if here:
        stored = some[:, None] & (n < SIZE)[None, :]
        row = WIDE + t * WIDTH
        gate_y = _y_of(row, some, slot, 0, N, 2, R)
        up_y = _y_of(row, some, slot, 1, N, 2, R)
        place = row[:, None] + n[None, :]
        gate = tl.load(place, mask=stored, other=0.0)
        up = tl.load(place + SIZE, mask=stored, other=0.0)
        tl.debug_barrier()  # all reads are under way
        gate_b, up_b = read(gate_b, PDL), read(up_b, PDL)
        gate_y, up_y = read(gate_y, PDL), read(up_y, PDL)
        gate, up = read(gate, PDL).to(tl.float32), read(up, PDL).to(tl.float32)
        gate = (gate + _by(gate_y, gate_b, IEEE)).to(DTYPE).to(tl.float32)
        up = (up + _by(up_y, up_b, IEEE)).to(DTYPE).to(tl.float32)
        active = activated(gate, GLU).to(DTYPE).to(tl.float32)  # rounded where torch rounds
        tl.store(OUT + t[:, None] * SIZE + n[None, :], (active * up).to(DTYPE), mask=stored)


def gate_expand(
    tiles: SlotTiles, wide: torch.Tensor, b: torch.Tensor, out: torch.Tensor, activation: Activation = "silu"
) -> None:
    """out (T, size) = activation(gate + B y) * (up + B y). wide (T, width): gate, up, then y; b (slots, 2 * size, R)."""
    size, rank = out.shape[1], b.shape[2]
    launch(
        _gate_expand, (triton.cdiv(size, GATE_BLOCK), tiles.most),
        tiles.tiles, wide, b, out, size, wide.shape[1], rank, tiles.width, GATE_BLOCK, gate_of(activation),
        wide.dtype == torch.float32, num_warps=_warps(GATE_WARPS, tiles, rank),
    )  # fmt: skip


@triton.jit
def _residual_norm(SLOTS, WIDE, B, HIDDEN, GAIN, OUT, eps, N: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr,
                   CHUNK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One token. All chunks are unrolled, and all is read before anything is written: the reads are under way together.

    What the kernel ahead, a product, does not write is read before it has ended: hidden states, gain, the first chunks of B.
    """
    DTYPE: tl.constexpr = HIDDEN.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + t).to(tl.int64)
    n = tl.arange(0, CHUNK)
    r = tl.arange(0, R)
    gains = ()
    befores = ()
    for first in tl.static_range(0, N, CHUNK):
        befores += (tl.load(HIDDEN + t * N + first + n, mask=first + n < N, other=0.0),)
        gains += (tl.load(GAIN + first + n, mask=first + n < N, other=0.0),)
    bs = ()
    for first in tl.static_range(0, AHEAD * CHUNK, CHUNK):
        bs += (_b_rows(B, slot, first + n, N, R),)
    follow(PDL)
    row = WIDE + t * WIDTH
    y = tl.load(row + N + slot * R + r, mask=(r >= 0) & (slot >= 0), other=0.0).to(tl.float32)
    adds = ()
    for first in tl.static_range(0, N, CHUNK):
        adds += (tl.load(row + first + n, mask=first + n < N, other=0.0),)
    xs = ()
    squares = tl.zeros([CHUNK], tl.float32)
    for first in tl.static_range(0, N, CHUNK):
        if first < AHEAD * CHUNK:
            b = bs[first // CHUNK]
        else:
            b = _b_rows(B, slot, first + n, N, R)
        x = befores[first // CHUNK].to(tl.float32) + adds[first // CHUNK].to(tl.float32)
        x = (x + tl.sum(b.to(tl.float32) * y[None, :], 1)).to(DTYPE)
        squares += x.to(tl.float32) * x.to(tl.float32)
        xs += (x,)
    scale = tl.rsqrt(tl.sum(squares, 0) / N + eps)
    for first in tl.static_range(0, N, CHUNK):
        x = xs[first // CHUNK]
        normed = x.to(tl.float32) * scale * gains[first // CHUNK].to(tl.float32)
        tl.store(HIDDEN + t * N + first + n, x, mask=first + n < N)
        tl.store(OUT + t * N + first + n, normed.to(DTYPE), mask=first + n < N)


def residual_norm(
    tiles: SlotTiles, wide: torch.Tensor, b: torch.Tensor, hidden: torch.Tensor, gain: torch.Tensor, eps: float,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """hidden (T, N) += wide[:, :N] + B y, then out (T, N) = its norm. wide (T, N + slots * R), b (slots, N, R).

    The kernel ahead must be the product that wrote `wide`: it does not write hidden, which is read before that one has ended.
    """
    (tokens, outputs), rank = hidden.shape, b.shape[2]
    few = tokens <= NORM_FEW_TOKENS
    warps = 2 * NORM_WARPS if few else NORM_WARPS
    chunk = min((NORM_FEW_CHUNK if few else NORM_CHUNK) // rank, triton.next_power_of_2(outputs))
    ahead = min(triton.cdiv(outputs, chunk), max(1, NORM_AHEAD * warps * 32 // (chunk * rank)))
    launch(
        _residual_norm, (tokens,),
        tiles.slots, wide, b, hidden, gain, out, eps, outputs, wide.shape[1], rank, chunk,
        ahead if wide.element_size() == 2 else 1, num_warps=warps,
    )  # fmt: skip
