"""Plans to the integers of a CUDA step.

Does: order the rows, fill a pinned `StepBuffer`, mirror the block tables and the slots of rows' adapters. Does not: touch the
device. Everything here is on the path between two steps: lists become arrays once, and there is no loop over rows except where
lists force one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tonle.engine.plan import Join, Plan
from tonle.models.cuda.batch import TILE_TOKENS, Count, Sizes, StepBuffer
from tonle.models.cuda.decode_tiling import stretch_tokens
from tonle.models.cuda.slot_tiling import DECODE_WIDTH, MIXED_WIDTH, fill_slot_tiles

RING = 4  # buffers: a step's is written while those of earlier ones may still be on their way to the device


@dataclass(slots=True)
class PackedStep:
    """One step, ready to be copied to the device."""

    buffer: StepBuffer
    size: int  # numbers of the buffer to copy
    num_tokens: int
    num_tiles: int | None  # None: every row goes on from the token it sampled last
    # Plan indices that sample, in the order of their tokens, once more for each guess; None = all, in the plan's order.
    sampling: list[int] | None
    begins: list[int] = field(default_factory=list)  # by plan index: first token among the step's; only in mixed steps
    long_rows: list[int] = field(default_factory=list)  # rows whose block tables did not fit among the updates
    adapted: bool = False  # some row has an adapter
    lasts: list[tuple[int, int]] = field(
        default_factory=list
    )  # row, token: to be known as sampled last before the step


class _Entries(NamedTuple):
    """Of a mixed step: those of the plan, and one more for each guess. A guess is a row of one token that reads the same blocks,
    one place further: attention cuts long contexts for it as for any other, and all keys of a step are written before any is
    read."""

    rows: list[int]
    starts: list[int]
    chunks: list[list[int] | None]
    samples: list[bool]
    owners: list[int]  # plan indices

    @classmethod
    def of(cls, plan: Plan) -> _Entries:
        if not plan.drafts:
            return cls(plan.rows, plan.starts, plan.chunks, plan.samples, list(range(len(plan.rows))))
        made = cls([], [], [], [], [])
        for i, chunk in enumerate(plan.chunks):
            count = plan.drafts.get(i, 0)
            assert chunk is None or not count or len(chunk) == 1 + count, "guesses follow one token"
            for place in range(1 + count):
                made.rows.append(plan.rows[i])
                made.starts.append(plan.starts[i] + place)
                made.chunks.append(chunk if chunk is None or not count else [chunk[place]])
                made.samples.append(plan.samples[i])
                made.owners.append(i)
        return made


class Packer:
    """Owns the pinned buffers and the host's copy of all block tables."""

    def __init__(self, sizes: Sizes, table_width: int, block_size: int, kv_heads: int, *, pinned: bool) -> None:
        self.tables = np.zeros((sizes.max_rows, table_width), dtype=np.int32)
        self._sizes = sizes
        self._block_size = block_size
        self._kv_heads = kv_heads
        self._ring = [StepBuffer(sizes, pinned=pinned) for _ in range(RING)]
        self._turn = 0
        self._identity = np.arange(sizes.max_rows, dtype=np.int32)
        self._num_given = [0] * sizes.max_rows  # tokens that a row joined with: those behind them were sampled since
        self.adapter_slots = np.full(sizes.max_rows, -1, dtype=np.int32)  # of each row's adapter, -1 = none
        self._any_adapter = False  # of any row, whether it is in a step or not

    def join(self, joins: list[Join]) -> None:
        for join in joins:
            self.adapter_slots[join.row] = join.adapter_slot
            self._num_given[join.row] = len(join.prompt) + len(join.output)
        self._any_adapter = bool(self.adapter_slots.max() >= 0)

    def pack(self, plan: Plan) -> PackedStep:
        buffer = self._ring[self._turn]
        self._turn = (self._turn + 1) % RING
        num_updates, long_rows = self._update(plan, buffer)
        buffer.host("counts")[Count.UPDATES] = num_updates
        if plan.chunks.count(None) == len(plan.chunks):
            packed = self._pack_decode(plan, buffer, num_updates)
        elif (lasts := self._lasts(plan)) is not None:
            packed = self._pack_decode(plan, buffer, num_updates)
            packed.lasts = lasts
        else:
            packed = self._pack_mixed(plan, buffer)
        packed.long_rows = long_rows
        return packed

    def _lasts(self, plan: Plan) -> list[tuple[int, int]] | None:
        """Rows that are not launched ahead, after guesses, with the token each goes on from: a decode step, if the device is told
        these tokens. None: the plan has others, too. Those of a row that is bound may be forced."""
        if plan.drafts or plan.bound or plan.prompts or plan.joins:
            return None
        lasts: list[tuple[int, int]] = []
        for i, chunk in enumerate(plan.chunks):
            if chunk is None:
                continue
            row = plan.rows[i]
            if len(chunk) > 1 or not plan.samples[i] or plan.starts[i] < self._num_given[row]:
                return None
            lasts.append((row, chunk[0]))
        return lasts

    def _update(self, plan: Plan, buffer: StepBuffer) -> tuple[int, list[int]]:
        """New blocks into the mirror, and as many as fit into the buffer. Returns how many, and the rows left out."""
        width = self.tables.shape[1]
        pairs: list[int] = []
        long_rows = []
        for row, first, blocks in plan.new_blocks:
            self.tables[row, first : first + len(blocks)] = blocks
            if len(pairs) // 2 + len(blocks) > self._sizes.max_updates:
                long_rows.append(row)
                continue
            place = row * width + first
            for block in blocks:
                pairs += (place, block)
                place += 1
        buffer.host("updates")[: len(pairs)] = pairs
        return len(pairs) // 2, long_rows

    def _pack_decode(self, plan: Plan, buffer: StepBuffer, num_updates: int) -> PackedStep:
        count = len(plan.rows)
        rows, starts = buffer.host("rows"), buffer.host("starts")
        rows[:count] = plan.rows
        starts[:count] = plan.starts
        buffer.host("sample_rows")[:count] = rows[:count]
        np.add(starts[:count], 1, out=buffer.host("sample_positions")[:count])
        self._cut(buffer, starts[:count] + 1)
        counts = buffer.host("counts")
        counts[Count.ROWS] = counts[Count.DECODING] = counts[Count.CONTINUING] = count
        counts[Count.TOKENS] = counts[Count.SAMPLES] = count
        counts[Count.TILES] = 0
        packed = PackedStep(buffer, buffer.updates_at + 2 * num_updates, count, None, None)
        if self._any_adapter and (slots := self.adapter_slots[rows[:count]]).max() >= 0:
            self._cut_by_slot(buffer, "sample", slots, DECODE_WIDTH)
            packed.adapted = True
        return packed

    def _cut_by_slot(self, buffer: StepBuffer, of: str, slots: np.ndarray, width: int) -> None:
        """Tile tokens by the slots (n,) of their adapters. Whatever a graph reads past the last token has none."""
        own = buffer.host(f"{of}_slots")
        own[: len(slots)] = slots
        own[len(slots) :] = -1
        fill_slot_tiles(buffer.host(f"{of}_slot_tiles").reshape(-1, 1 + width), slots, self._sizes.adapter_slots)

    def _cut(self, buffer: StepBuffer, contexts: np.ndarray) -> None:
        """Cut the contexts (n,) of decoding rows into stretches."""
        counts = buffer.host("counts")
        stretches = stretch_tokens(contexts, self._kv_heads)
        per_row = -(-contexts // stretches)
        ends = per_row.cumsum()
        num_items = int(ends[-1]) if len(ends) else 0
        buffer.host("row_items")[: len(contexts)] = ends - per_row
        buffer.host("item_rows")[:num_items] = np.repeat(self._identity[: len(contexts)], per_row)
        buffer.host("row_stretches")[: len(contexts)] = stretches
        counts[Count.ITEMS] = num_items

    def _pack_mixed(self, plan: Plan, buffer: StepBuffer) -> PackedStep:
        entries = _Entries.of(plan)
        count = len(entries.rows)
        kinds = [0 if chunk is None else min(len(chunk), 2) for chunk in entries.chunks]
        order = sorted(range(count), key=kinds.__getitem__)  # going on, then other single tokens, then several
        chunks = [chunk for i in order if (chunk := entries.chunks[i]) is not None]
        num_continuing = count - len(chunks)
        num_decoding = sum(kind < 2 for kind in kinds)
        sizes = np.ones(count, dtype=np.int64)
        sizes[num_continuing:] = [len(chunk) for chunk in chunks]
        ends = sizes.cumsum()
        begins, num_tokens = ends - sizes, int(ends[-1])
        rows = np.array([entries.rows[i] for i in order])
        starts = np.array([entries.starts[i] for i in order])
        row_of = np.repeat(np.arange(count), sizes)  # (T,)
        positions = np.arange(num_tokens) + (starts - begins)[row_of]  # (T,)
        slots = self.tables[rows[row_of], positions // self._block_size] * self._block_size
        buffer.host("rows")[:count] = rows
        buffer.host("starts")[:count] = starts
        buffer.host("row_begins")[:count] = begins
        buffer.host("row_sizes")[:count] = sizes
        buffer.host("tokens")[num_continuing:num_tokens] = np.concatenate([np.array(chunk) for chunk in chunks])
        buffer.host("positions")[:num_tokens] = positions
        buffer.host("slots")[:num_tokens] = slots + positions % self._block_size
        self._cut(buffer, starts[:num_decoding] + 1)
        num_tiles = self._tile(buffer, sizes, num_decoding)
        sampling = [place for place, i in enumerate(order) if entries.samples[i]]
        buffer.host("sample_indices")[: len(sampling)] = (ends - 1)[sampling]
        buffer.host("sample_rows")[: len(sampling)] = rows[sampling]
        buffer.host("sample_positions")[: len(sampling)] = (starts + sizes)[sampling]
        counts = buffer.host("counts")
        counts[Count.ROWS], counts[Count.DECODING], counts[Count.CONTINUING] = count, num_decoding, num_continuing
        counts[Count.TOKENS], counts[Count.SAMPLES], counts[Count.TILES] = num_tokens, len(sampling), num_tiles
        begins_of = {
            entries.owners[i]: begin for i, begin in zip(reversed(order), reversed(begins.tolist()), strict=True)
        }
        packed = PackedStep(
            buffer, buffer.token_slots_at, num_tokens, num_tiles, [entries.owners[order[place]] for place in sampling],
            begins=[begins_of[i] for i in range(len(plan.rows))],
        )  # fmt: skip
        if self._any_adapter and (adapters := self.adapter_slots[rows]).max() >= 0:
            self._cut_by_slot(buffer, "sample", adapters[sampling], DECODE_WIDTH)
            self._cut_by_slot(buffer, "token", adapters[row_of], MIXED_WIDTH)
            packed.adapted, packed.size = True, len(buffer.numpy)
        return packed

    @staticmethod
    def _tile(buffer: StepBuffer, sizes: np.ndarray, num_decoding: int) -> int:
        """Cut the queries of rows with several tokens into tiles. Returns how many."""
        per_row = -(-sizes[num_decoding:] // TILE_TOKENS)
        num_tiles = int(per_row.sum())
        firsts = np.repeat(per_row.cumsum() - per_row, per_row)
        buffer.host("tile_rows")[:num_tiles] = np.repeat(np.arange(num_decoding, len(sizes)), per_row)
        buffer.host("tile_firsts")[:num_tiles] = (np.arange(num_tiles) - firsts) * TILE_TOKENS
        return num_tiles
