"""How decode attention is cut into stretches of context: the arithmetic that the host, the buffers and the kernel share.

Does: lengths and bounds. Does not: need triton or a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

JOINED_AT_ONCE = 8  # stretches that `_joined` of `decode_attention.py` reads together
_SHORTEST = 64  # stretch, tokens


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """How the work of a step is cut, by its number of rows."""

    block_keys: int  # keys per turn of the loop
    warps: int
    stages: int  # of the loop, as triton counts them: with 5 one more turn's keys are under way than with 3 or 4
    programs: int  # about so many for the whole step, if contexts are long enough
    eager: bool  # the first keys and values are read before the queries are there
    # So many keys are read in the time that joining eight more stretches takes; 0: joining is not counted.
    join_keys: int = 0


_FEW = DecodeTiling(block_keys=64, warps=8, stages=3, programs=264, eager=True, join_keys=50)
_MANY = DecodeTiling(block_keys=32, warps=1, stages=4, programs=1056, eager=False)
_FEW_FP8 = replace(_FEW, eager=False)
_MANY_FP8 = replace(_MANY, stages=5)  # a turn has half the bytes


def few_rows(kv_heads: int) -> int:
    """Up to so many rows are few."""
    return max(4, 32 // kv_heads)


def decode_tiling(rows: int, kv_heads: int, *, fp8: bool = False) -> DecodeTiling:
    """Few rows: as little latency as possible. Many: as many reads in flight as possible."""
    few = rows <= few_rows(kv_heads)
    if fp8:
        return _FEW_FP8 if few else _MANY_FP8
    return _FEW if few else _MANY


def in_small_memory(tiling: DecodeTiling) -> DecodeTiling:
    """The same for heads of more than 128 float32 on GPUs with little shared memory: half the keys at a time, fewer under way."""
    return replace(tiling, block_keys=tiling.block_keys // 2, stages=3)


def max_items(rows: int, kv_heads: int) -> int:
    """Most stretches `rows` rows are cut into. See `stretch_tokens`."""
    return rows + decode_tiling(rows, kv_heads).programs // kv_heads


def stretch_tokens(contexts: np.ndarray, kv_heads: int) -> np.ndarray:
    """How long the stretches of each row are, so that all rows together fill the device: (n,) of contexts (n,), tokens.

    A row's stretches are equally long, but for the last. A row is not cut for the sake of a rest shorter than half a stretch:
    joining costs more than waiting for it. Few rows are cut less where reading a little longer takes less than joining.
    """
    tiling = decode_tiling(len(contexts), kv_heads)
    wanted = np.maximum(contexts.sum() * kv_heads / tiling.programs, 1.0)
    pieces = np.maximum((contexts / wanted + 0.5).astype(np.int64), 1)
    if tiling.join_keys:
        # So many that the sum of reading and joining is least.
        rounds = np.sqrt(contexts / (JOINED_AT_ONCE * tiling.join_keys)) + 0.5
        pieces = np.minimum(pieces, JOINED_AT_ONCE * np.maximum(rounds.astype(np.int64), 1))
    stretches: np.ndarray = np.maximum(-(-contexts // (pieces * tiling.block_keys)) * tiling.block_keys, _SHORTEST)
    return stretches
