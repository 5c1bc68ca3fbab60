"""The weights of adapters on the device: for each matrix, A of all slots below its own rows, and B of all slots beside it.

Does: lay them out once, prepare an adapter for a slot, and fill one. Does not: multiply (`pieces.py`) or know which slot has
which adapter. Ranks are padded with zeros to a power of two, 16 at least, which tensor cores need; what an adapter does not
change has zeros in its slot.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from tonle.models.adapters import MODULES, Adapter, AdapterPart
from tonle.models.cuda.gemv_adapter import OneRowAdapter, OneRowScratch
from tonle.models.cuda.matrix import Matrix
from tonle.models.cuda.quantized_matrix import AnyMatrix, WideQuantized
from tonle.models.layers import Layer


def padded_rank(max_rank: int) -> int:
    return max(16, 1 << (max_rank - 1).bit_length())


class AdaptedMatrix:
    """A matrix (N, K) and its adapters. `wide` (N + slots * modules * rank, K) gives N outputs and y of each."""

    def __init__(
        self, matrix: AnyMatrix, modules: tuple[str, ...], parts: tuple[int, ...], num_slots: int, rank: int
    ) -> None:
        """`parts`: outputs of each module."""
        assert sum(parts) == matrix.outputs
        rows = len(parts) * rank
        self.modules = modules
        self.parts = parts
        self.wide: Matrix | WideQuantized
        self.wide, a = matrix.widened(num_slots * rows)
        if isinstance(self.wide, Matrix):
            self.wide.gate_up = len(parts) == 2
        self.a = a.view(num_slots, rows, -1)
        self.b = a.new_zeros(num_slots, matrix.outputs, rank)
        self.one_row: OneRowAdapter | None = None  # how the product of a single row takes part; `AdaptedLayer` sets it

    def lay_out(self, parts: list[AdapterPart | None], a: torch.Tensor, b: torch.Tensor) -> None:
        """Fill `a` and `b`, flat and as large as A and B of one slot, with an adapter's parts of each module."""
        a, b = a.view_as(self.a[0]), b.view_as(self.b[0])
        for part, own_a, own_b in zip(parts, a.chunk(len(self.parts)), b.split_with_sizes(self.parts), strict=True):
            used = 0 if part is None else part.rank
            if part is not None:
                own_a[:used].copy_(part.a)
                own_b[:, :used].copy_(part.b)
            own_a[used:].zero_()
            own_b[:, used:].zero_()


@dataclass(slots=True, eq=False)
class AdaptedLayer:
    qkv: AdaptedMatrix
    o: AdaptedMatrix
    gate_up: AdaptedMatrix | None = None  # None, as the next: the layer has experts, which adapters do not change
    down: AdaptedMatrix | None = None

    @classmethod
    def of(
        cls, layer: Layer, matrices: dict[str, AnyMatrix], num_slots: int, scratch: OneRowScratch, slot: torch.Tensor
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
        every = self.qkv, self.o, self.gate_up, self.down
        return tuple(matrix for matrix in every if matrix is not None)


@dataclass(frozen=True, slots=True, eq=False)
class PinnedAdapter:
    """An adapter as slots hold it: A and B of each matrix in turn, in pinned memory, so that nothing waits for the copies."""

    digest: str
    rank: int
    numbers: torch.Tensor  # (numbers of a slot,)

    @property
    def num_bytes(self) -> int:
        return self.numbers.nbytes


class CudaAdapters:
    """All layers' adapters, by slot."""

    def __init__(self, layers: list[AdaptedLayer], num_slots: int, rank: int) -> None:
        self.num_slots = num_slots
        self.rank = rank
        self.layers = layers
        self._matrices = [(index, matrix) for index, layer in enumerate(layers) for matrix in layer.matrices]
        # Of each slot, A and B of each matrix, flat.
        self._places = [
            [tensor[slot].view(-1) for _, matrix in self._matrices for tensor in (matrix.a, matrix.b)]
            for slot in range(num_slots)
        ]
        self._sizes = [place.numel() for place in self._places[0]]

    @property
    def num_bytes(self) -> int:
        """On the device, without buffers."""
        return sum(self._sizes) * self.num_slots * self._places[0][0].element_size()

    def pin(self, adapter: Adapter) -> PinnedAdapter:
        """Takes tens of milliseconds, and may be called from any thread."""
        assert adapter.rank <= self.rank, f"rank {adapter.rank} in slots of rank {self.rank}"
        numbers = self._room()
        pieces = numbers.split_with_sizes(self._sizes)
        for (index, matrix), a, b in zip(self._matrices, pieces[::2], pieces[1::2], strict=True):
            matrix.lay_out([adapter.parts.get((index, module)) for module in matrix.modules], a, b)
        return PinnedAdapter(adapter.digest, adapter.rank, numbers)

    def set(self, slot: int, adapter: PinnedAdapter | None) -> None:
        """Steps launched from now on compute rows of this slot with this adapter; those launched before do not notice."""
        if adapter is None:
            for place in self._places[slot]:
                place.zero_()
            return
        # Dropped meanwhile, its memory is not given out again before the copies have ended: torch sees to that.
        for place, numbers in zip(self._places[slot], adapter.numbers.split_with_sizes(self._sizes), strict=True):
            place.copy_(numbers, non_blocking=True)

    def _room(self) -> torch.Tensor:
        """For one adapter, on the host."""
        like = self._places[0][0]
        with torch.cuda.device(like.device) if like.is_cuda else nullcontext():
            return torch.empty(sum(self._sizes), dtype=like.dtype, pin_memory=like.is_cuda)


def modules_of(layer: Layer) -> dict[str, tuple[str, ...]]:
    """The modules that stand side by side in each matrix of a layer."""
    q, k, v, o, gate, up, down = MODULES
    both = (gate, up) if len(layer.gate_up.sizes) == 2 else (up,)
    return {"qkv": (q, k, v), "o": (o,), "gate_up": both, "down": (down,)}
