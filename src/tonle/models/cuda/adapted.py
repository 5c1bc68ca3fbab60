"""The weights of adapters on the device: for each matrix, A of all slots below its own rows, and B of all slots beside it.

Does: lay them out once, and fill a slot. Does not: multiply (`pieces.py`) or know which slot has which adapter. Ranks are padded
with zeros to a power of two, 16 at least, which tensor cores need; what an adapter does not change has zeros in its slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tonle.models.adapters import MODULES, Adapter, AdapterPart
from tonle.models.cuda.gemv_adapter import OneRowAdapter, OneRowScratch
from tonle.models.cuda.matrix import Matrix
from tonle.models.layers import Layer


def padded_rank(max_rank: int) -> int:
    return max(16, 1 << (max_rank - 1).bit_length())


class AdaptedMatrix:
    """A matrix (N, K) and its adapters. `wide` (N + slots * modules * rank, K) gives, in one product, N outputs and y of each."""

    def __init__(
        self, matrix: Matrix, modules: tuple[str, ...], parts: tuple[int, ...], num_slots: int, rank: int
    ) -> None:
        """`parts`: outputs of each module. The matrix becomes a view of the first rows of `wide`."""
        outputs, inputs = matrix.weight.shape
        assert sum(parts) == outputs
        rows = len(parts) * rank
        weight = matrix.weight.new_empty(outputs + num_slots * rows, inputs)
        weight[:outputs].copy_(matrix.weight)
        weight[outputs:].zero_()
        matrix.move(weight[:outputs])
        bias = matrix.bias
        if bias is not None:
            bias = torch.cat((bias, bias.new_zeros(num_slots * rows)))
        self.modules = modules
        self.parts = parts
        self.wide = Matrix(weight, weight.t(), bias, gate_up=len(parts) == 2)
        self.a = weight[outputs:].view(num_slots, rows, inputs)
        self.b = weight.new_zeros(num_slots, outputs, rank)
        self.one_row: OneRowAdapter | None = None  # how the product of a single row takes part; `AdaptedLayer` sets it

    @property
    def slot_numbers(self) -> int:
        """Of one slot, A and B."""
        return self.a[0].numel() + self.b[0].numel()

    def clear(self, slot: int) -> None:
        self.a[slot].zero_()
        self.b[slot].zero_()

    def fill(self, slot: int, parts: list[AdapterPart | None], staging: torch.Tensor) -> None:
        """Through `staging` (slot_numbers,) on the host, pinned so that nothing waits for the copies."""
        a = staging[: self.a[slot].numel()].view_as(self.a[slot])
        b = staging[self.a[slot].numel() :].view_as(self.b[slot])
        for part, own_a, own_b in zip(parts, a.chunk(len(self.parts)), b.split_with_sizes(self.parts), strict=True):
            used = 0 if part is None else part.rank
            if part is not None:
                own_a[:used].copy_(part.a)
                own_b[:, :used].copy_(part.b)
            own_a[used:].zero_()
            own_b[:, used:].zero_()
        self.a[slot].copy_(a, non_blocking=True)
        self.b[slot].copy_(b, non_blocking=True)


@dataclass(slots=True, eq=False)
class AdaptedLayer:
    qkv: AdaptedMatrix
    o: AdaptedMatrix
    gate_up: AdaptedMatrix
    down: AdaptedMatrix

    @classmethod
    def of(
        cls, layer: Layer, matrices: dict[str, Matrix], num_slots: int, scratch: OneRowScratch, slot: torch.Tensor
    ) -> AdaptedLayer:
        """`matrices`: by the names of this class's. `scratch` serves all layers; `slot` (1,) int32: that of a single row."""
        modules, made = modules_of(layer), {}
        for name, matrix in matrices.items():
            sizes = getattr(layer, name).sizes
            made[name] = AdaptedMatrix(matrix, modules[name], sizes, num_slots, scratch.rank)
            made[name].one_row = OneRowAdapter(slot, made[name].a, made[name].b, sizes, scratch, name)
        return cls(**made)

    @property
    def matrices(self) -> tuple[AdaptedMatrix, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class AdapterSlots:
    """All layers' adapters, by slot."""

    def __init__(self, layers: list[AdaptedLayer], num_slots: int, rank: int) -> None:
        self.num_slots = num_slots
        self.rank = rank
        self.layers = layers
        self._pinned = layers[0].qkv.b.is_cuda
        self._staging()  # the first time takes long; from then on torch has this memory at hand

    @property
    def num_bytes(self) -> int:
        """On the device, without buffers."""
        return sum(matrix.slot_numbers * matrix.b.element_size() * self.num_slots for _, matrix in self._matrices())

    def _staging(self) -> torch.Tensor:
        """Room for one adapter on the host. torch does not give it out again before the copies from it have ended."""
        numbers = sum(matrix.slot_numbers for _, matrix in self._matrices())
        return torch.empty(numbers, dtype=self.layers[0].qkv.b.dtype, pin_memory=self._pinned)

    def _matrices(self) -> Iterator[tuple[int, AdaptedMatrix]]:
        for index, layer in enumerate(self.layers):
            for matrix in layer.matrices:
                yield index, matrix

    def set(self, slot: int, adapter: Adapter | None) -> None:
        """Steps launched from now on compute rows of this slot with this adapter; those launched before do not notice."""
        if adapter is None:
            for _, matrix in self._matrices():
                matrix.clear(slot)
            return
        assert adapter.rank <= self.rank, f"rank {adapter.rank} in slots of rank {self.rank}"
        pieces = self._staging().split_with_sizes([matrix.slot_numbers for _, matrix in self._matrices()])
        for (index, matrix), staging in zip(self._matrices(), pieces, strict=True):
            matrix.fill(slot, [adapter.parts.get((index, module)) for module in matrix.modules], staging)


def modules_of(layer: Layer) -> dict[str, tuple[str, ...]]:
    """The modules that stand side by side in each matrix of a layer."""
    q, k, v, o, gate, up, down = MODULES
    both = (gate, up) if len(layer.gate_up.sizes) == 2 else (up,)
    return {"qkv": (q, k, v), "o": (o,), "gate_up": both, "down": (down,)}
