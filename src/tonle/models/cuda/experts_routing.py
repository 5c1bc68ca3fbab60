# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Which experts a token gets, decided on the device: from the router's logits to lists of tokens, one for each expert.

Does: `assign`, for many rows: one program per expert finds the tokens that chose it. A token that gives an expert the place r
among its choices (0: the first) is pair t * TOP + r, so that no two programs write to the same place, and lists are in the order
of tokens: the result does not depend on which program was first. Functions for kernels: `nth_expert` and `experts_of` (the choice
of one row, found again by each program that needs it: cheaper than a kernel that leaves it), `tile_of` (where a tile of a grouped
product finds its pairs). Does not: compute logits (`experts.py`), or multiply.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.launch import follow, launch

_LOWEST = tl.constexpr(-(2**31))  # below the key of any logit


@triton.jit
def _assign(LOGITS, LIVE, COUNTS, LISTS, SHARES, WIDTH: tl.constexpr, CAPACITY: tl.constexpr, E: tl.constexpr,
            EP: tl.constexpr, TOP: tl.constexpr, NORMED: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One expert: how many tokens chose it, which pairs those are, and their shares (normed ones are not divided yet)."""
    follow(PDL)
    expert = tl.program_id(0)
    live = tl.load(LIVE)
    e = tl.arange(0, EP)
    found = tl.zeros([1], tl.int32)
    for first in tl.range(0, live, BT, num_stages=3):
        t = first + tl.arange(0, BT)
        real = t < live
        own = tl.load(LOGITS + t * WIDTH + expert, mask=real, other=0.0).to(tl.float32)
        some = real[:, None] & (e < E)[None, :]
        logit = tl.load(LOGITS + t[:, None] * WIDTH + e[None, :], mask=some, other=float("-inf")).to(tl.float32)
        ahead = (logit > own[:, None]) | ((logit == own[:, None]) & (e < expert)[None, :])
        rank = tl.sum(ahead.to(tl.int32), 1)
        top = tl.max(logit, 1)
        share = tl.exp(own - top)
        if not NORMED:
            share /= tl.sum(tl.exp(logit - top[:, None]), 1)
        hit = real & (rank < TOP)
        place = found + tl.cumsum(hit.to(tl.int32), 0) - 1
        pair = t * TOP + rank
        tl.store(LISTS + expert * CAPACITY + place, pair, mask=hit)
        tl.store(SHARES + pair, share, mask=hit)
        found += tl.sum(hit.to(tl.int32), 0)
    tl.store(COUNTS + expert + tl.arange(0, 1), found)


def assign(
    logits: torch.Tensor,
    live: torch.Tensor,
    counts: torch.Tensor,
    lists: torch.Tensor,
    shares: torch.Tensor,
    *,
    top: int,
    normed: bool,
) -> None:
    """logits (T, width), of which the first `counts.numel()` columns are experts; the first live[0] rows exist.

    counts (experts,) int32: tokens of each. lists (experts, capacity of T at least) int32: its pairs. shares (T * top,) float32:
    of each pair; `normed`: those of a token are still to be divided by their sum.
    """
    tokens, width = logits.shape
    experts, capacity = lists.shape
    assert capacity >= tokens and counts.numel() == experts
    padded = triton.next_power_of_2(experts)
    block = max(1, min(512, 8192 // padded))  # tokens at a time; 16 numbers for each of 512 threads
    launch(
        _assign, (experts,),
        logits, live, counts, lists, shares, width, capacity, experts, padded, top, normed, block, num_warps=16,
    )  # fmt: skip


@triton.jit
def keys_of(LOGITS, E: tl.constexpr, EP: tl.constexpr):
    """Integers in the order of one row's logits: their maximum takes one instruction. -> keys (EP,)"""
    e = tl.arange(0, EP)
    bits = tl.load(LOGITS + e, mask=e < E, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(e < E, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LOWEST)


@triton.jit
def best_of(keys, E: tl.constexpr, EP: tl.constexpr):
    """The best expert (of equals the first), its key, and the keys without it."""
    e = tl.arange(0, EP)
    key = tl.max(keys, 0)
    expert = tl.min(tl.where(keys == key, e, EP), 0)
    return tl.minimum(expert, E - 1), key, tl.where(e == expert, _LOWEST, keys)


@triton.jit
def nth_expert(keys, n, E: tl.constexpr, EP: tl.constexpr):
    """The expert of which n are better."""
    for _ in range(n):
        _, _, keys = best_of(keys, E, EP)
    expert, _, _ = best_of(keys, E, EP)
    return expert


@triton.jit
def logit_of(key):
    """Back from `keys_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def tile_of(COUNTS, tile, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    """Tiles are BM pairs of one expert's list; those of expert 0 come first. -> expert (E or more: there is no such tile), the
    tile's first place in its list, and how many pairs the list has."""
    e = tl.arange(0, EP)
    count = tl.load(COUNTS + e, mask=e < E, other=0)
    tiles = (count + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(e < expert, tiles, 0), 0)
    return expert, (tile - before) * BM, tl.sum(tl.where(e == expert, count, 0), 0)
