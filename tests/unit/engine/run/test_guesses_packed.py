"""Guesses as rows of a CUDA step, and what is made of the tokens drawn for them."""

from __future__ import annotations

import numpy as np
import torch

from tonle.engine.plan import Join, Plan
from tonle.engine.request import ResolvedConfig
from tonle.engine.run.checked import checked
from tonle.engine.run.packing import Packer
from tonle.engine.run.runner import LaunchedStep
from tonle.models.cuda.batch import Count, Sizes
from tonle.models.cuda.decode_tiling import max_items

BLOCK = 16


def packer() -> Packer:
    made = Packer(Sizes(16, 64, 64, max_items(16, 2), guess_rows=8), 8, BLOCK, 2, pinned=False)
    made.join([Join(row, [5] * 10, [], ResolvedConfig(), 0) for row in range(4)])
    return made


def plan() -> Plan:
    """Row 2 goes on; row 1 has three guesses, the last two in its second block; row 3 has a token that was read."""
    made = Plan(
        rows=[1, 2, 3], starts=[14, 20, 12], chunks=[[7, 8, 9, 10], None, [11]], samples=[True] * 3, drafts={0: 3}
    )
    made.new_blocks = [(1, 0, [4, 6]), (2, 0, [1, 2]), (3, 0, [9])]
    return made


def test_a_guess_is_a_row_that_reads_the_same_blocks_one_place_further() -> None:
    packed = packer().pack(plan())
    host = packed.buffer.host
    assert packed.num_tiles == 0 and packed.num_tokens == 6
    counts = host("counts")
    assert counts[[Count.ROWS, Count.DECODING, Count.CONTINUING, Count.SAMPLES]].tolist() == [6, 6, 1, 6]
    assert host("rows")[:6].tolist() == [2, 1, 1, 1, 1, 3]
    assert host("starts")[:6].tolist() == [20, 14, 15, 16, 17, 12]
    assert host("tokens")[1:6].tolist() == [7, 8, 9, 10, 11]
    assert host("slots")[1:6].tolist() == [4 * BLOCK + 14, 4 * BLOCK + 15, 6 * BLOCK, 6 * BLOCK + 1, 9 * BLOCK + 12]
    assert host("sample_positions")[:6].tolist() == [21, 15, 16, 17, 18, 13], "each its own place"
    assert np.array_equal(host("sample_indices")[:6], np.arange(6))
    assert packed.sampling == [1, 0, 0, 0, 0, 2]
    assert packed.begins == [1, 0, 5]


def test_rows_whose_tokens_were_read_are_a_decode_step() -> None:
    made = packer()
    made.pack(plan())
    after = Plan(rows=[1, 2], starts=[16, 21], chunks=[[3], None], samples=[True, True])
    packed = made.pack(after)
    assert packed.num_tiles is None and packed.lasts == [(1, 3)]
    prompt = Plan(rows=[1], starts=[9], chunks=[[3]], samples=[True])  # the last token of a prompt, left alone
    assert made.pack(prompt).num_tiles == 0
    forced = Plan(rows=[1], starts=[16], chunks=[[3]], samples=[True], bound=[0])
    assert made.pack(forced).num_tiles == 0


def test_what_counts_ends_behind_the_first_wrong_guess() -> None:
    """The guesses are 8, 9, 10. Row 2 draws 7 and row 3 draws 3."""
    for drawn, more in (([8, 9, 5, 6], [9, 5]), ([8, 9, 10, 5], [9, 10, 5]), ([9, 8, 9, 10], [])):
        result = checked(LaunchedStep(plan(), [1, 0, 0, 0, 0, 2], torch.tensor([7, *drawn, 3])))
        assert result.tokens == [drawn[0], 7, 3]
        assert result.more == {0: more}
