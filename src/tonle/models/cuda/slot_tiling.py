"""How tokens are cut into tiles by the slots of their adapters: the arithmetic that the host, the buffers and kernels share.

Does: orders and bounds. Does not: need triton or a device. Slot -1 stands for tokens without an adapter: they have tiles, too.
"""

from __future__ import annotations

import numpy as np

DECODE_WIDTH = 16  # tokens of a tile, at most, where each row has one: many small groups
MIXED_WIDTH = 64  # in steps with prompts


def max_slot_tiles(tokens: int, num_slots: int, width: int) -> int:
    """Most tiles so many tokens are cut into: each group but a full one has a rest."""
    groups = min(num_slots + 1, tokens)
    return (tokens + groups * (width - 1)) // width


def cut_by_slot(slots: np.ndarray, num_slots: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Of tokens with these slots (T,): all tokens, those of one slot together (T,); tiles (n, 3): first place, how many, slot."""
    groups = slots.astype(np.int16) + 1
    tokens = groups.argsort(kind="stable")  # of 16 bits: a radix sort
    sizes = np.bincount(groups, minlength=num_slots + 1)
    per_group = -(-sizes // width)
    num_tiles = int(per_group.sum())
    group_of = np.repeat(np.arange(len(sizes)), per_group)  # (n,)
    nth = np.arange(num_tiles) - (per_group.cumsum() - per_group)[group_of]  # of its group
    tiles = np.empty((num_tiles, 3), dtype=np.int32)
    tiles[:, 0] = (sizes.cumsum() - sizes)[group_of] + nth * width
    tiles[:, 1] = np.minimum(sizes[group_of] - nth * width, width)
    tiles[:, 2] = group_of - 1
    return tokens, tiles
