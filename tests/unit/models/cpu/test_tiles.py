"""Attention over an int8 cache in tiles, against sums in float64 over the same cache, and against itself in other company.

Queries are rounded to 16 bits: scores are off by some 2e-5 of the largest, and outputs by as much of the largest value where the
largest score is about 1; the first head's are larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numba import njit

from tonle.models.cpu import kernels
from tonle.models.cpu.cpu_int8_attention import HAS_TILES
from tonle.models.cpu.products import OPTIONS
from tonle.models.cpu.tiles import takes_tiles

pytestmark = pytest.mark.skipif(not HAS_TILES, reason="this processor has no 8-bit dot product of 512-bit vectors")
KV_HEADS = 2
CONTEXT = 83  # the last block is partly filled


@dataclass(frozen=True)
class Case:
    dim: int = 64
    group: int = 3
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    block: int = 16


CASES = {
    "plain": Case(),
    "heads of 128": Case(dim=128),
    "heads of 192": Case(dim=192),
    "heads of 512": Case(dim=512, group=1),
    "a key head for each query head": Case(group=1),
    "groups of 4, blocks of 32": Case(group=4, block=32),
    "groups of 8": Case(group=8, dim=128),
    "a window": Case(window=20),
    "a window of one": Case(window=1),
    "a window of a tile, sinks": Case(window=16, sinks=True),
    "a soft cap": Case(cap=2.0),
    "sinks": Case(sinks=True),
    "all of it": Case(dim=128, group=4, window=37, cap=3.0, sinks=True, block=48),
    "not in tiles: heads of 48": Case(dim=48),
    "not in tiles: blocks of 24": Case(block=24),
    "not in tiles: heads of 20": Case(dim=20, sinks=True, cap=2.0, window=20),
}


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _attend(q: Any, first: Any, last: Any, keys: Any, values: Any, key_scales: Any, value_scales: Any, unpacked: Any, table: Any,
            positions: Any, window: Any, scale: Any, cap: Any, sinks: Any, scores: Any, out: Any) -> None:  # fmt: skip
    room = kernels.row_room(positions[-1] + 1)
    kernels.attend(q, first, last, keys, values, key_scales, value_scales, unpacked, table, positions, window, scale, cap, sinks,
                   room, scores, out)  # fmt: skip


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _takes_tiles(cache: Any) -> Any:
    return takes_tiles(cache)


class Sequence:
    """A cache with one sequence in scattered blocks, and queries of its tokens; all else in it is noise with scales of NaN."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.case, self.heads = case, KV_HEADS * case.group
        num_blocks = -(-CONTEXT // case.block)
        self.table = rng.permutation(num_blocks + 3)[:num_blocks].astype(np.int32)
        shape = (num_blocks + 3, case.block, KV_HEADS, case.dim)
        self.keys, self.values = (rng.integers(-127, 128, shape, dtype=np.int8) for _ in range(2))
        self.scales = [np.full((shape[0], KV_HEADS, case.block), np.nan, np.float32) for _ in range(2)]
        for position in range(CONTEXT):
            for scales in self.scales:
                place = self.table[position // case.block], slice(None), position % case.block
                scales[place] = rng.uniform(0.2, 1.0, KV_HEADS) / 127
        self.q = rng.standard_normal((CONTEXT, self.heads, case.dim)).astype(np.float32)
        self.q[:, 0] *= 8  # a head with a few large weights
        self.scale = np.float32(case.dim**-0.5 * 2)
        self.sinks = rng.standard_normal(self.heads if case.sinks else 0).astype(np.float32)
        self.unpacked = np.zeros(int(np.prod(shape[1:])), np.float32)

    def attended(self, begin: int, end: int, at_once: int | None = None) -> np.ndarray:
        """Of tokens begin..end, computed together, so many heads at a time."""
        at_once = at_once or self.heads
        positions = np.arange(begin, end)
        out = np.full((end - begin, self.heads, self.case.dim), np.nan, np.float32)
        scores = np.full((end - begin) * self.heads * (CONTEXT + 64), np.nan, np.float32)
        for first in range(0, self.heads, at_once):
            _attend(self.q[begin:end], first, first + at_once, self.keys, self.values, *self.scales, self.unpacked, self.table,
                    positions, self.case.window, self.scale, np.float32(self.case.cap), self.sinks, scores, out)  # fmt: skip
        return out

    def expected(self) -> np.ndarray:
        """Of all tokens, in float64, a token and a head at a time."""
        case, out = self.case, np.zeros(self.q.shape)
        places = np.arange(CONTEXT)
        blocks, offsets = self.table[places // case.block], places % case.block
        keys, values = (
            numbers[blocks, offsets] * scales[blocks, :, offsets][..., None].astype(np.float64)
            for numbers, scales in zip((self.keys, self.values), self.scales, strict=True)
        )  # (context, kv heads, dim)
        for t in range(CONTEXT):
            seen = slice(max(0, t + 1 - case.window) if case.window else 0, t + 1)
            for h in range(self.heads):
                scores = keys[seen, h // case.group] @ self.q[t, h].astype(np.float64) * float(self.scale)
                if case.cap:
                    scores = case.cap * np.tanh(scores / case.cap)
                weights = np.exp(scores)
                total = weights.sum() + (np.exp(float(self.sinks[h])) if case.sinks else 0)
                out[t, h] = weights / total @ values[seen, h // case.group]
        return out


def test_which_shapes_are_taken_in_tiles() -> None:
    taken = {name for name, case in CASES.items() if _takes_tiles(Sequence(case).keys)}
    assert taken == {name for name in CASES if not name.startswith("not in tiles")}
    assert not _takes_tiles(np.zeros((1, 16, 1, 64), np.float32))


@pytest.mark.parametrize("name", CASES)
def test_attention_in_tiles_equals_sums_in_float64(name: str) -> None:
    sequence = Sequence(CASES[name])
    expected = sequence.expected()
    for begin in range(0, CONTEXT, 8):
        end = min(begin + 8, CONTEXT)
        error = np.abs(sequence.attended(begin, end) - expected[begin:end])
        assert error[:, 0].max() < 5e-4 and error[:, 1:].max() < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_a_token_has_the_same_bits_in_every_company(name: str) -> None:
    """Alone, in spans that begin and end anywhere, with all heads or fewer."""
    sequence = Sequence(CASES[name], seed=1)
    alone = np.concatenate([sequence.attended(t, t + 1) for t in range(CONTEXT)])
    for size in (2, 5, 8):
        for begin in range(CONTEXT - size + 1):
            for at_once in {sequence.heads, CASES[name].group, 1}:
                np.testing.assert_array_equal(
                    sequence.attended(begin, begin + size, at_once), alone[begin : begin + size]
                )


def test_what_other_sequences_left_in_a_block_changes_nothing() -> None:
    sequence = Sequence(CASES["plain"])
    before = sequence.attended(CONTEXT - 1, CONTEXT)
    last = sequence.table[-1], slice(CONTEXT % 16, None)
    sequence.keys[last], sequence.values[last] = -128, -128
    for scales in sequence.scales:
        scales[sequence.table[-1], :, CONTEXT % 16 :] = np.inf
    np.testing.assert_array_equal(sequence.attended(CONTEXT - 1, CONTEXT), before)


@pytest.mark.parametrize("name", ["plain", "a window", "sinks", "not in tiles: heads of 48"])
def test_a_query_that_is_not_a_number_stays_so_and_alone(name: str) -> None:
    sequence = Sequence(CASES[name])
    before = sequence.attended(75, 83)
    sequence.q[78, 1] = np.nan
    after = sequence.attended(75, 83)
    assert np.isnan(after[3, 1]).all()
    after[3, 1] = before[3, 1]
    np.testing.assert_array_equal(after, before)


def test_a_query_of_zeros_weighs_all_positions_alike() -> None:
    sequence = Sequence(CASES["plain"])
    sequence.q[...] = 0
    np.testing.assert_allclose(sequence.attended(75, 83), sequence.expected()[75:], rtol=0, atol=1e-6)
