"""A weight and the ways it is multiplied: one row by our GEMV, 2 to 16 by our skinny product where it wins, more by cuBLAS.

Does: choose by the number of rows, and put norm, bias, activation and residual around the product, fused where the kernel
can. Does not: own buffers; callers bring those that a way needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tonle.models.cuda.gemv import gemv
from tonle.models.cuda.pointwise import rms_norm, silu_mul
from tonle.models.cuda.skinny import MAX_ROWS, SplitScratch, skinny, skinny_tiling
from tonle.models.layers import Linear


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Root mean square norm of a product's input, and where to put the result where it is not fused: (tokens, hidden)."""

    gain: torch.Tensor
    eps: float
    buffer: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.gain, self.eps, self.buffer[: x.shape[0]])


@dataclass(slots=True, eq=False)
class Matrix:
    """(out, in), its transpose as cuBLAS wants it, and its bias."""

    weight: torch.Tensor
    columns: torch.Tensor  # (in, out), a view
    bias: torch.Tensor | None
    scratch: SplitScratch | None = None  # of the model's; set by `share_scratch`

    @classmethod
    def of(cls, linear: Linear) -> Matrix:
        """Weights that belong to a live model come in parts, and are copied into one here."""
        weights = [part.dense for part in linear.parts]
        biases = [part.bias for part in linear.parts if part.bias is not None]
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        return cls(weight, weight.t(), torch.cat(biases) if biases else None)

    def apply(self, x: torch.Tensor, norm: Norm, out: torch.Tensor) -> None:
        """out (n, out) = norm(x) @ W.T + bias."""
        if x.shape[0] == 1:
            gemv(x, self.weight, out, gain=norm.gain, eps=norm.eps, bias=self.bias)
        elif (tiling := skinny_tiling(x.shape[0], *self.weight.shape, glu=False)) is not None:
            skinny(norm(x), self.weight, out, tiling, bias=self.bias, scratch=self.scratch)
        else:
            self._cublas(norm(x), out)

    def add(self, x: torch.Tensor, out: torch.Tensor, *, settled: bool = False) -> None:
        """out (n, out) += x @ W.T + bias. `settled`: the kernel ahead does not write out."""
        if x.shape[0] == 1:
            gemv(x, self.weight, out, bias=self.bias, add=True, settled=settled)
        elif (tiling := skinny_tiling(x.shape[0], *self.weight.shape, glu=False)) is not None:
            skinny(x, self.weight, out, tiling, bias=self.bias, add=True, settled=settled, scratch=self.scratch)
        else:
            out.addmm_(x, self.columns)
            if self.bias is not None:
                out.add_(self.bias)

    def gate(self, x: torch.Tensor, norm: Norm, both: torch.Tensor, out: torch.Tensor) -> None:
        """W is gate and up: out (n, out / 2) = silu(gate) * up of norm(x). `both` (n, out) is scratch."""
        outputs, inputs = out.shape[1], x.shape[1]
        if x.shape[0] == 1:
            gemv(x, self.weight, out, gain=norm.gain, eps=norm.eps, bias=self.bias, glu=True)
        elif (tiling := skinny_tiling(x.shape[0], outputs, inputs, glu=True)) is not None:
            skinny(norm(x), self.weight, out, tiling, bias=self.bias, glu=True)
        else:
            self._cublas(norm(x), both)
            silu_mul(both, out)

    def _cublas(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self.columns, out=out)
        else:
            torch.addmm(self.bias, x, self.columns, out=out)


def share_scratch(matrices: Sequence[Matrix], device: torch.device) -> None:
    """One scratch for all of them: they are multiplied one after another."""
    scratch = SplitScratch(
        [(m.weight.shape[0], skinny_tiling(MAX_ROWS, *m.weight.shape, glu=False)) for m in matrices], device
    )
    for matrix in matrices:
        matrix.scratch = scratch
