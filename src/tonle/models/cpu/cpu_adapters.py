"""`CpuAdapters`: the adapters that are resident, laid out for `low_rank.py`, and which tokens of a step use which.

Does: lay out A and B of a slot, in bfloat16 where nothing is lost by it; sort a step's rows by slot. Does not: compute.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from tonle.models.adapters import Adapter, AdapterPart
from tonle.models.cpu.layout import row_order
from tonle.models.cpu.low_rank import NUM_FIELDS, QUAD, Adapters, in_pairs
from tonle.models.cpu.memory import Array, aligned
from tonle.models.cpu.pack import perceptron_size
from tonle.models.cpu.vector import HALF, ROWS
from tonle.models.inputs import StepInputs
from tonle.models.spec import ModelSpec

KINDS = (
    ("q", "k", "v"),
    ("o",),
    ("gate", "up"),
    ("down",),
)  # the modules of each kind of matrix, as `low_rank.py` counts them
LINE = 64  # bytes of a cache line


class _Rows(NamedTuple):
    """Where the output rows of one module lie in B (blocks, passes, rank, ROWS)."""

    block: Array
    turn: Array  # which pass
    lane: Array
    row: Array  # of the module


class _Matrix:
    """One kind of matrix: its modules, and how the blocks of its output are divided among them."""

    def __init__(self, sizes: list[int], *, gated: bool) -> None:
        order = row_order(sum(sizes), gated=gated).reshape(-1, 2, HALF)  # joined row, or the number of rows for none
        ends = np.cumsum(sizes)
        owners = np.searchsorted(ends, order, side="right")  # (blocks, 2, HALF) module, or len(sizes)
        present = (owners[..., None] == np.arange(len(sizes))).any(axis=2)  # (blocks, 2, modules)
        self.passes = int(present.sum(axis=-1).max())
        self.num_blocks = len(order)
        self.halves = np.full((self.num_blocks, self.passes, 2), -1, dtype=np.int64)
        turn_of = present.cumsum(axis=-1) - 1  # (blocks, 2, modules)
        for module in range(len(sizes)):
            block, half = np.nonzero(present[..., module])
            self.halves[block, turn_of[block, half, module], half] = module
        both = self.halves.max(axis=-1, keepdims=True)
        self.halves = np.where(self.halves < 0, both, self.halves)  # a half without a module adds zeros
        self.rows = []
        for module, end in enumerate(ends):
            block, half, lane = np.nonzero(owners == module)
            row = order[block, half, lane] - (end - sizes[module])
            self.rows.append(_Rows(block, turn_of[block, half, module], half * HALF + lane, row))

    def lay_out(self, parts: list[AdapterPart | None], passes: int) -> tuple[Array, Array]:
        """A (modules, rank, K) and B (blocks, passes, rank, ROWS), see `low_rank.py`; the rank in whole QUADs."""
        rank = -(-max(part.rank for part in parts if part is not None) // QUAD) * QUAD
        width = next(part.a.shape[1] for part in parts if part is not None)
        a = np.zeros((len(parts), rank, width), dtype=np.float32)
        b = np.zeros((self.num_blocks, passes, rank, ROWS), dtype=np.float32)
        for module, (part, rows) in enumerate(zip(parts, self.rows, strict=True)):
            if part is not None:
                a[module, : part.rank] = part.a.numpy()
                b.transpose(0, 1, 3, 2)[rows.block, rows.turn, rows.lane, : part.rank] = part.b.numpy()[rows.row]
        return _narrow(a), _narrow(b)


def _narrow(values: Array) -> Array:
    """bfloat16 bits if every number is one, to spare memory traffic; otherwise as it is."""
    halves = values.view(np.uint16)  # lower, upper, lower, …
    return values if halves[..., ::2].any() else in_pairs(halves[..., 1::2])


def _lines(values: Array) -> int:
    """Cache lines it takes."""
    return -(-values.nbytes // LINE)


class CpuAdapters:
    """`num_slots` places for adapters of up to `max_rank`. Memory is taken as adapters come."""

    def __init__(self, spec: ModelSpec, num_slots: int, max_rank: int) -> None:
        self._max_rank = max_rank
        inner = perceptron_size(spec) or HALF  # without one no adapter has parts for it
        kinds = (
            [spec.q_size, spec.kv_size, spec.kv_size],
            [spec.hidden_size],
            [inner] * 2,
            [spec.hidden_size],
        )
        self._matrices = [_Matrix(sizes, gated=len(sizes) == 2) for sizes in kinds]
        passes, blocks = (max(getattr(m, name) for m in self._matrices) for name in ("passes", "num_blocks"))
        self._modules = np.full((len(KINDS), blocks, passes, 2), -1, dtype=np.int64)
        for kind, matrix in enumerate(self._matrices):
            self._modules[kind, : matrix.num_blocks, : matrix.passes] = matrix.halves
        self._places = np.zeros((num_slots, spec.num_layers, len(KINDS), NUM_FIELDS), dtype=np.int64)
        # What the addresses in `_places` point at: one piece for each slot, which so comes in large pages.
        self._memory: list[Array | None] = [None] * num_slots
        self._widths = max(spec.hidden_size, inner), 3 * -(-max_rank // QUAD) * QUAD
        self._x, self._y = (np.zeros((0, width), dtype=np.float32) for width in self._widths)

    def set_adapter(self, slot: int, adapter: Adapter | None) -> None:
        """Between steps: the slot's rows use this adapter from now on; None: none."""
        if adapter is not None and adapter.rank > self._max_rank:
            raise ValueError(f"the adapter's rank is {adapter.rank}; there is room for {self._max_rank}")
        self._places[slot] = 0
        self._memory[slot] = None
        if adapter is None:
            return
        found: list[tuple[int, int, Array, Array]] = []  # layer, kind, A, B
        for layer in range(self._places.shape[1]):
            for kind, modules in enumerate(KINDS):
                parts = [adapter.parts.get((layer, module)) for module in modules]
                if any(part is not None for part in parts):
                    found.append((layer, kind, *self._matrices[kind].lay_out(parts, self._modules.shape[2])))
        room = sum(_lines(a) + _lines(b) for _, _, a, b in found)
        self._memory[slot] = memory = aligned((room * LINE,), np.dtype(np.uint8))
        at = 0
        for layer, kind, a, b in found:
            addresses = []
            for values in (a, b):
                memory[at : at + values.nbytes] = values.reshape(-1).view(np.uint8)
                addresses.append(memory.ctypes.data + at)
                at += _lines(values) * LINE
            shorts = (int(each.dtype == np.uint16) for each in (a, b))
            self._places[slot, layer, kind] = (*addresses, b.shape[2], a.shape[0] * a.shape[1], a.strides[1], *shorts)

    def step(self, slots_of_tokens: Array, slots_of_wanted: Array) -> Adapters:
        """For tokens that are sorted by slot."""
        if slots_of_tokens[-1] >= len(self._places):
            raise ValueError(f"there is no slot {slots_of_tokens[-1]}: there are {len(self._places)}")
        count = len(slots_of_tokens)
        if count > len(self._x):
            self._x, self._y = (aligned((count, width), np.dtype(np.float32)) for width in self._widths)
        return Adapters(
            self._places,
            self._modules,
            _runs(slots_of_tokens),
            _runs(slots_of_wanted),
            self._x[:count],
            self._y[:count],
        )


def _runs(slots: Array) -> Array:
    """(runs, 3): slot, first token, last token + 1; of tokens without an adapter there is none."""
    borders = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
    found: list[Any] = [(slots[a], a, b) for a, b in pairwise(borders) if b > a and slots[a] >= 0]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def sort_by_slot(inputs: StepInputs) -> tuple[StepInputs, Array]:
    """The same step with its rows sorted by slot, rows without an adapter first; and the slot of each of its tokens."""
    assert inputs.adapter_slots is not None
    slots = np.array(inputs.adapter_slots)
    sizes = np.diff(inputs.row_starts)
    order = np.argsort(slots, kind="stable")
    slots_of_tokens = np.repeat(slots[order], sizes[order])
    if (order[1:] > order[:-1]).all():
        return inputs, slots_of_tokens
    places = np.argsort(np.repeat(slots, sizes), kind="stable")  # which token comes where: rows stay whole
    now_at = np.empty_like(places)
    now_at[places] = np.arange(len(places))
    chosen, moved = torch.from_numpy(places), torch.from_numpy(now_at)
    return StepInputs(
        tokens=inputs.tokens[chosen], positions=inputs.positions[chosen], slots=inputs.slots[chosen],
        row_starts=[0, *np.cumsum(sizes[order]).tolist()], context_lens=[inputs.context_lens[row] for row in order],
        block_tables=inputs.block_tables[torch.from_numpy(order)], num_decode=0,
        logit_indices=moved[inputs.logit_indices], adapter_slots=slots[order].tolist(),
        hidden_indices=None if inputs.hidden_indices is None else moved[inputs.hidden_indices],
    ), slots_of_tokens  # fmt: skip
