"""The integers of one step in one buffer, so that one copy brings them all to the device.

Does: name the sections and place them; the same layout on the host (pinned) and on the device. Does not: fill them
(`engine/run/packing.py`). Sections a pure decode step needs come first: such a step copies only those.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from tonle.models.cuda.slot_tiling import DECODE_WIDTH, MIXED_WIDTH, max_slot_tiles

_ALIGN = 32  # int32 numbers: sections begin at multiples of 128 bytes


class Count(IntEnum):
    """Places in the header."""

    ROWS = 0  # sequences in this step
    DECODING = 1  # of them, those with one token; they come first
    CONTINUING = 2  # of those, the ones whose token is the one sampled last; they come first
    TOKENS = 3
    SAMPLES = 4
    UPDATES = 5  # new entries of block tables
    TILES = 6  # pieces of at most `TILE_TOKENS` queries of one row, for prefill attention
    ITEMS = 7  # stretches of decoding rows' contexts, for decode attention


TILE_TOKENS = 64  # queries one program of prefill attention handles


@dataclass(frozen=True, slots=True)
class Sizes:
    max_rows: int  # of a step: sequences, and their guesses
    max_tokens: int
    max_updates: int
    max_items: int
    adapter_slots: int = 0  # 0: no adapters
    guess_rows: int = 0  # of `max_rows`, those for guesses alone

    @property
    def max_sequences(self) -> int:
        return self.max_rows - self.guess_rows

    @property
    def max_tiles(self) -> int:
        return -(-self.max_tokens // TILE_TOKENS) + self.max_rows


class StepBuffer:
    """Views of one int32 tensor. All are (n,) int32."""

    def __init__(self, sizes: Sizes, *, device: torch.device | None = None, pinned: bool = False) -> None:
        self.sizes = sizes
        rows, tokens, updates, tiles = sizes.max_rows, sizes.max_tokens, sizes.max_updates, sizes.max_tiles
        adapters = sizes.adapter_slots
        adapted_rows, adapted_tokens = (rows, tokens) if adapters else (0, 0)
        lengths = {
            "counts": len(Count),
            "rows": rows,  # the row each entry of the step belongs to
            "starts": rows,  # tokens of it already in the cache
            "sample_rows": rows,
            "sample_positions": rows,  # the place the sampled token will take
            "row_items": rows,  # the row's first item
            "row_stretches": rows,  # tokens of context in each of its items, the last one's excepted
            "item_rows": sizes.max_items,  # entry of the step each stretch of context belongs to
            # Of steps with adapters: `SlotTiles` of the samples, which are all tokens of a pure decode step.
            "sample_slots": adapted_rows,
            "sample_slot_tiles": (1 + DECODE_WIDTH) * max_slot_tiles(adapted_rows, adapters, DECODE_WIDTH),
            "updates": 2 * updates,  # pairs: row * table width + place, block
            "sample_indices": rows,  # tokens of a mixed step whose logits are wanted; a pure decode step does not send it
            "row_begins": rows,  # the row's first token among the step's
            "row_sizes": rows,  # its tokens in this step
            "tile_rows": tiles,  # entry of the step
            "tile_firsts": tiles,  # first query of the tile, counted from the row's first
            "tokens": tokens,
            "positions": tokens,
            "slots": tokens,  # block * block_size + offset
            # Of mixed steps with adapters: `SlotTiles` of all tokens.
            "token_slots": adapted_tokens,
            "token_slot_tiles": (1 + MIXED_WIDTH) * max_slot_tiles(adapted_tokens, adapters, MIXED_WIDTH),
        }
        offsets = {}
        total = 0
        for name, length in lengths.items():
            offsets[name] = total
            total += -(-length // _ALIGN) * _ALIGN
        self.updates_at = offsets["updates"]  # a pure decode step copies up to here, and its updates
        self.token_slots_at = offsets["token_slots"]  # a mixed step without adapters copies up to here
        self.all = torch.zeros(total, dtype=torch.int32, device=device, pin_memory=pinned)
        self.numpy: np.ndarray = self.all.numpy() if device is None else np.empty(0, np.int32)
        self._views = {name: self.all[offsets[name] : offsets[name] + length] for name, length in lengths.items()}
        self._numpy_views = (
            {} if device is not None
            else {name: self.numpy[offsets[name] : offsets[name] + length] for name, length in lengths.items()}
        )  # fmt: skip

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def host(self, name: str) -> np.ndarray:
        return self._numpy_views[name]
