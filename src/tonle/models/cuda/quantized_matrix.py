"""A weight of few-bit numbers and the ways it is multiplied: what `Matrix` is for 16-bit ones, with the same methods.

Does: choose by form and number of rows. One row: `pair_gemv.py` or `quantized_gemv.py`. More: `quantized_dot.py`, on tensor
cores. Many rows: e4m3 with a scale per output multiplies rows rounded to e4m3 (`fp8_product.py`); other forms are unpacked to
memory, a part at a time, and multiplied by cuBLAS, or not even unpacked where memory has the same weights in 16 bits (`twin`).
Does not: own the buffers of those two (`Room`), which all matrices share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from tonle.models.cuda.activation import gate_of
from tonle.models.cuda.few_bits import table_words
from tonle.models.cuda.fp8_product import SWITCHES, Fp8Scratch, few_rows, fp8_product, fp8_rows
from tonle.models.cuda.gemv_adapter import OneRowAdapter
from tonle.models.cuda.gpu_features import multiplies_fp8
from tonle.models.cuda.matrix import Matrix, Norm
from tonle.models.cuda.pair_gemv import pair_gemv, suits
from tonle.models.cuda.pointwise import gate_mul
from tonle.models.cuda.quantized_dot import DotTiling, dot_tiling, quantized_dot
from tonle.models.cuda.quantized_gemv import quantized_gemv
from tonle.models.cuda.skinny import MAX_ROWS, SplitScratch
from tonle.models.cuda.unpack import unpack
from tonle.models.layers import Linear, Quantized
from tonle.models.packed import WORDS, Packed, pack
from tonle.models.spec import Activation

UNPACK_ROWS = 64  # more rows than these: unpacked to memory
_UNPACKED = 2**24  # numbers unpacked at a time: they stay in L2 until cuBLAS has read them
# One row of these goes to tensor cores: looking numbers up takes longer than reading, and there it takes fewer instructions.
ON_TENSOR_CORES: frozenset[str] = frozenset({"table"})
# One row of these is multiplied two numbers at a time where groups allow it: activations of 16 bits lose nothing that shows.
IN_PAIRS: frozenset[str] = frozenset()
_ALIGN = 128  # outputs: cuBLAS is many times slower where its results do not begin at such a multiple


class Room:
    """Buffers of products with many rows. One serves all matrices: they are multiplied one after another."""

    def __init__(self, matrices: Iterable[QuantizedMatrix], tokens: int, like: torch.Tensor) -> None:
        every = list(matrices)
        rounded = [WORDS * 4 * matrix.packed.num_blocks for matrix in every if matrix.rounds_rows]
        unpacked = [min(_UNPACKED, matrix.packed.shape.numel()) for matrix in every if matrix.unpacks]
        if tokens <= UNPACK_ROWS:
            unpacked = []
        self._rows = torch.zeros(tokens * max(rounded, default=0), dtype=torch.uint8, device=like.device)
        self._scale = torch.zeros(tokens, dtype=torch.float32, device=like.device)
        self.weights = like.new_zeros(max(unpacked, default=0))
        shapes = [(m.outputs, WORDS * 4 * m.packed.num_blocks) for m in every if m.rounds_rows]
        self.split = Fp8Scratch(shapes, tokens, like.device)

    def fp8_rows(self, x: torch.Tensor, norm: Norm | None, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x (n, K), normed if there is a norm, as (n, width) e4m3 and scales (n,)."""
        count = x.shape[0]
        rows = self._rows[: count * width].view(count, width).view(torch.float8_e4m3fn)
        scale = self._scale[:count]
        if norm is None:
            fp8_rows(x, rows, scale)
        else:
            fp8_rows(x, rows, scale, gain=norm.gain, eps=norm.eps)
        return rows, scale


@dataclass(slots=True, eq=False)
class QuantizedMatrix:
    """(out, in) in few bits, and its bias."""

    packed: Packed
    bias: torch.Tensor | None
    dtype: torch.dtype  # of what it is multiplied with
    table: torch.Tensor | None = None  # as kernels take it
    scratch: SplitScratch | None = None  # of the model's, as `room`
    room: Room | None = None
    twin: torch.Tensor | None = None  # (out, in): the same weights in 16 bits, where memory has them anyway

    @property
    def outputs(self) -> int:
        return self.packed.shape[0]

    @property
    def rounds_rows(self) -> bool:
        """Whether many rows are rounded to e4m3: the weights are, and the GPU multiplies such numbers."""
        return self.packed.form == "fp8" and self.packed.group == 0 and multiplies_fp8()

    @property
    def in_pairs(self) -> bool:
        """Whether one row, without an adapter, goes to `pair_gemv.py`."""
        return self.packed.form in IN_PAIRS and self.dtype != torch.float32 and suits(self.packed)

    @property
    def unpacks(self) -> bool:
        """Whether many rows multiply weights that are unpacked to memory."""
        return not self.rounds_rows and self.twin is None

    def tiling(self, rows: int) -> DotTiling | None:
        return dot_tiling(self.packed, rows, glu=False)

    # `adapter`: of the one row there is; what it adds to W is added.

    def apply(
        self, x: torch.Tensor, norm: Norm | None, out: torch.Tensor, adapter: OneRowAdapter | None = None
    ) -> None:
        """out (n, out) = norm(x) @ W.T + bias."""
        if x.shape[0] == 1:
            self._one(x, norm, out, adapter)
        else:
            self._many(x, norm, out, add=False, settled=False)

    def product(self, x: torch.Tensor, out: torch.Tensor, adapter: OneRowAdapter | None = None) -> None:
        """out (n, out) = x @ W.T + bias. Rows of out may be apart."""
        self.apply(x, None, out, adapter)

    def add(
        self, x: torch.Tensor, out: torch.Tensor, adapter: OneRowAdapter | None = None, *, settled: bool = False
    ) -> None:
        """out (n, out) += x @ W.T + bias. `settled`: the kernel ahead does not write out."""
        if x.shape[0] == 1:
            self._one(x, None, out, adapter, add=True, settled=settled)
        else:
            self._many(x, None, out, add=True, settled=settled)

    def gate(
        self, x: torch.Tensor, norm: Norm | None, both: torch.Tensor, out: torch.Tensor,
        adapter: OneRowAdapter | None = None, *, activation: Activation = "silu",
    ) -> None:  # fmt: skip
        """W is gate and up: out (n, out / 2) = activation(gate) * up of norm(x). `both` (n, out) is scratch."""
        rows, glu = x.shape[0], gate_of(activation)
        if rows == 1:
            self._one(x, norm, out, adapter, glu=glu)
        elif rows <= MAX_ROWS:
            x = x if norm is None else norm(x)
            quantized_dot(x, self.packed, out, table=self.table, bias=self.bias, glu=glu)
        else:
            self._many(x, norm, both, add=False, settled=False)
            gate_mul(both, out, activation)

    def _one(
        self, x: torch.Tensor, norm: Norm | None, out: torch.Tensor, adapter: OneRowAdapter | None, *, add: bool = False,
        settled: bool = False, glu: int = 0,
    ) -> None:  # fmt: skip
        gain, eps = (None, 0.0) if norm is None else (norm.gain, norm.eps)
        if adapter is None and self.packed.form in ON_TENSOR_CORES:
            quantized_dot(x, self.packed, out, table=self.table, gain=gain, eps=eps, bias=self.bias, add=add,
                          settled=settled, glu=glu, scratch=self.scratch)  # fmt: skip
        elif adapter is None and self.in_pairs:
            pair_gemv(x, self.packed, out, gain=gain, eps=eps, bias=self.bias, add=add, settled=settled, glu=glu)
        else:
            quantized_gemv(x, self.packed, out, table=self.table, gain=gain, eps=eps, bias=self.bias, add=add,
                           settled=settled, glu=glu, adapter=adapter)  # fmt: skip

    def _many(self, x: torch.Tensor, norm: Norm | None, out: torch.Tensor, *, add: bool, settled: bool) -> None:
        rows = x.shape[0]
        if rows > MAX_ROWS and self.rounds_rows:
            assert self.room is not None
            width = WORDS * 4 * self.packed.num_blocks
            rounded, scale = self.room.fp8_rows(x, norm, width)
            fp8_product(rounded, scale, self.packed, out, bias=self.bias, add=add, scratch=self.room.split)
            return
        x = x if norm is None else norm(x)
        if rows <= UNPACK_ROWS:
            quantized_dot(x, self.packed, out, table=self.table, bias=self.bias, add=add, settled=settled and norm is None,
                          scratch=self.scratch)  # fmt: skip
            return
        for outputs, columns in self._columns():
            part, bias = out[:, outputs], None if self.bias is None else self.bias[outputs]
            if add:
                part.addmm_(x, columns)
                if bias is not None:
                    part.add_(bias)
            elif bias is None:
                torch.mm(x, columns, out=part)
            else:
                torch.addmm(bias, x, columns, out=part)

    def _columns(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some outputs and their weights (in, outputs), in turn; unpacked ones use the memory of those before."""
        if self.twin is not None:
            yield slice(0, self.outputs), self.twin.t()
            return
        assert self.room is not None
        outputs, inputs = self.packed.shape
        most = max(1, self.room.weights.numel() // inputs)
        most = most // _ALIGN * _ALIGN or most
        for first in range(0, outputs, most):
            some = slice(first, min(first + most, outputs))
            yield some, unpack(self.packed, self.room.weights, some, self.table).t()

    def widened(self, rows: int) -> tuple[WideQuantized, torch.Tensor]:
        """A product that also gives those of so many rows of 16-bit weights, zeros at first: (rows, in)."""
        more = torch.zeros(rows, self.packed.shape[1], dtype=self.dtype, device=self.packed.numbers.device)
        return WideQuantized(self, more), more


@dataclass(slots=True, eq=False)
class WideQuantized:
    """A matrix in few bits and rows of 16-bit weights below it (`adapted.py`), multiplied one after the other."""

    matrix: QuantizedMatrix
    more: torch.Tensor  # (rows, in)

    @property
    def outputs(self) -> int:
        return self.matrix.outputs + self.more.shape[0]

    def product(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x (n, in) -> out (n, outputs)."""
        outputs = self.matrix.outputs
        self.matrix.product(x, out[:, :outputs])
        torch.mm(x, self.more.t(), out=out[:, outputs:])


AnyMatrix = Matrix | QuantizedMatrix


def matrix_of(linear: Linear, dtype: torch.dtype) -> AnyMatrix:
    """A linear map as kernels multiply it. Quantized weights are packed, and the map keeps the packed ones."""
    parts = [part.weight for part in linear.parts if isinstance(part.weight, Quantized)]
    if len(linear.parts) == 1 and parts and (packed := pack(parts[0])) is not None:
        linear.parts[0].weight = packed
        return QuantizedMatrix(packed, linear.parts[0].bias, dtype, table_words(packed, dtype))
    for part in linear.parts:
        if isinstance(
            part.weight, Quantized
        ):  # in groups that no kernel reads, or beside others that are not quantized
            part.weight = part.weight.unpacked(dtype)
    return Matrix.of(linear)


def share_room(matrices: Iterable[AnyMatrix], tokens: int, like: torch.Tensor) -> None:
    """One for all of them, with room for so many tokens."""
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
    room = Room(quantized, tokens, like)
    for matrix in quantized:
        matrix.room = room


def row_switches(matrices: Iterable[AnyMatrix]) -> set[int]:
    """More rows than each of these may launch other kernels."""
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
    found = {rows for m in quantized if m.rounds_rows for rows in (few_rows(m.outputs), *SWITCHES)}
    return found | {MAX_ROWS, UNPACK_ROWS} if quantized else set()
