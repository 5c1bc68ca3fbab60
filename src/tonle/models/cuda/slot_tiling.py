"""How tokens are cut into tiles by the slots of their adapters: the arithmetic that the host, the buffers and kernels share.

Does: orders and bounds. Does not: need triton or a device. Slot -1 stands for tokens without an adapter: they have tiles, too.
"""

from __future__ import annotations

import numpy as np

DECODE_WIDTH = 16  # tokens of a tile, at most, where each row has one: many small groups
MIXED_WIDTH = 16  # in steps with prompts


def max_slot_tiles(tokens: int, num_slots: int, width: int) -> int:
    """Most tiles so many tokens are cut into: each group but a full one has a rest."""
    groups = min(num_slots + 1, tokens)
    return (tokens + groups * (width - 1)) // width


def fill_slot_tiles(tiles: np.ndarray, slots: np.ndarray, num_slots: int) -> int:
    """Cut tokens with these slots (T,) into tiles (most, 1 + width): each tile's slot, then its tokens, -1 past the last.

    Returns how many tiles there are; those that follow have slot -1 and no tokens.
    """
    width = tiles.shape[1] - 1
    groups = slots.astype(np.int16) + 1
    tokens = groups.argsort(kind="stable")  # those of one slot together; of 16 bits: a radix sort
    sizes = np.bincount(groups, minlength=num_slots + 1)
    per_group = -(-sizes // width)
    first_tiles = per_group.cumsum() - per_group
    num_tiles = int(per_group.sum())
    tiles.fill(-1)
    tiles[:num_tiles, 0] = np.repeat(np.arange(-1, len(sizes) - 1), per_group)
    group_of = groups[tokens]
    nth = np.arange(len(tokens)) - (sizes.cumsum() - sizes)[group_of]  # of its group
    tiles[first_tiles[group_of] + nth // width, 1 + nth % width] = tokens
    return num_tiles
