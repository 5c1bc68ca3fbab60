"""A matrix by all its ways, one row to seventeen, against torch: norm, bias, residual and gated activation around it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, rms_norm

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tonle.models.cuda.activation import GATES
from tonle.models.cuda.matrix import Matrix, Norm, share_scratch
from tonle.models.cuda.skinny import skinny_tiling
from tonle.models.experts import gated
from tonle.models.layers import Linear, LinearPart
from tonle.models.spec import Activation

pytestmark = pytest.mark.crossed

CPU = torch.device("cpu")
EPS = 1e-5
INPUTS = 72
each_way = pytest.mark.parametrize("rows", [1, 2, 16, 17])  # GEMV, skinny twice, cuBLAS
with_and_without_bias = pytest.mark.parametrize("with_bias", [False, True])


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def matrix_of(outputs: int, inputs: int, *, with_bias: bool) -> Matrix:
    """Two parts side by side, the second stored as its transpose."""
    first, second = numbers(outputs // 2, inputs), numbers(outputs - outputs // 2, inputs, seed=1)
    biases = (numbers(outputs // 2), numbers(outputs - outputs // 2, seed=1)) if with_bias else (None, None)
    parts = (LinearPart(first, biases[0]), LinearPart(second.t().contiguous(), biases[1], transposed=True))
    return Matrix.of(Linear(*parts))


def norm_of(inputs: int) -> Norm:
    return Norm(numbers(inputs).abs() + 0.5, EPS, torch.full((20, inputs), torch.nan))


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return rms_norm(x, x.shape[1:], norm.gain, norm.eps)


@each_way
@with_and_without_bias
def test_apply(rows: int, with_bias: bool) -> None:
    matrix, norm, x = matrix_of(50, INPUTS, with_bias=with_bias), norm_of(INPUTS), numbers(rows, INPUTS)
    out = torch.full((rows, 50), torch.nan)
    matrix.apply(x, norm, out)
    torch.testing.assert_close(out, linear(normed(x, norm), matrix.weight, matrix.bias), rtol=1e-4, atol=1e-4)


@each_way
@with_and_without_bias
def test_add(rows: int, with_bias: bool) -> None:
    matrix, x, out = matrix_of(50, INPUTS, with_bias=with_bias), numbers(rows, INPUTS), numbers(rows, 50)
    expected = out + linear(x, matrix.weight, matrix.bias)
    matrix.add(x, out)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@each_way
@with_and_without_bias
@pytest.mark.parametrize("activation", GATES)
def test_gate(rows: int, with_bias: bool, activation: Activation) -> None:
    matrix, norm, x = matrix_of(2 * 42, INPUTS, with_bias=with_bias), norm_of(INPUTS), numbers(rows, INPUTS)
    norm.gain.mul_(0.1)  # sums of about 1: where activations bend
    out = torch.full((rows, 42), torch.nan)
    matrix.gate(x, norm, torch.full((rows, 2 * 42), torch.nan), out, activation=activation)
    expected = gated(linear(normed(x, norm), matrix.weight, matrix.bias), activation)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@each_way
def test_gate_without_a_norm(rows: int) -> None:
    matrix, x = matrix_of(2 * 42, INPUTS, with_bias=False), numbers(rows, INPUTS)
    out = torch.full((rows, 42), torch.nan)
    matrix.gate(x, None, torch.full((rows, 2 * 42), torch.nan), out)
    torch.testing.assert_close(out, gated(linear(x, matrix.weight), "silu"), rtol=1e-4, atol=1e-4)


def test_matrices_that_split_share_one_scratch() -> None:
    matrices = [matrix_of(outputs, 4200, with_bias=False) for outputs in (200, 700)]
    tilings = [skinny_tiling(5, *matrix.weight.shape, glu=False) for matrix in matrices]
    assert all(tiling is not None and tiling.split > 1 for tiling in tilings)
    share_scratch(matrices, CPU)
    assert matrices[0].scratch is matrices[1].scratch
    for matrix in matrices:
        x, out = numbers(5, 4200), numbers(5, matrix.weight.shape[0])
        expected = out + linear(x, matrix.weight)
        matrix.add(x, out)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
