"""A matrix times 2 to 16 rows against torch: every option, sizes that do not divide evenly, outputs poisoned beforehand."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from benchmarks.gpu_products import products_of

from tonle.models.cuda.pointwise import gate_mul
from tonle.models.cuda.skinny import MAX_ROWS, SkinnyTiling, SplitScratch, skinny, skinny_tiling

pytestmark = pytest.mark.crossed

CPU = torch.device("cpu")
WHOLE = SkinnyTiling(16, 32, stages=3)
SPLIT = SkinnyTiling(32, 32, stages=2, split=3)
MODELS = ("qwen2.5-1.5b", "llama-3.2-3b", "llama-2-7b")
MAX_SHARED_BYTES = 227 * 1024  # of one program, on an H100 or H200
NUM_MULTIPROCESSORS = 132


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """With NaN behind them: whatever is read past the end shows."""
    whole = torch.full((shape[0] + 2, *shape[1:]), torch.nan)
    return whole[: shape[0]].normal_(generator=torch.Generator().manual_seed(seed + sum(shape)))


def guarded(rows: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An output full of NaN and the rows behind it, which must not be touched."""
    whole = torch.full((rows + MAX_ROWS, outputs), torch.nan)
    whole[rows:] = 7.0
    return whole[:rows], whole[rows:]


def poisoned_scratch(*shapes: tuple[int, SkinnyTiling | None]) -> SplitScratch:
    """Parts start as NaN: one that is read before it was written shows."""
    scratch = SplitScratch(shapes, CPU)
    scratch.parts.fill_(torch.nan)
    return scratch


@pytest.mark.parametrize("tiling", [WHOLE, SPLIT], ids=("whole", "split"))
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(2, 32, 96), (16, 40, 72), (5, 50, 100)])
def test_product(tiling: SkinnyTiling, with_bias: bool, rows: int, outputs: int, inputs: int) -> None:
    x, weight, bias = numbers(rows, inputs), numbers(outputs, inputs), numbers(outputs) if with_bias else None
    out, behind = guarded(rows, outputs)
    assert skinny(x, weight, out, tiling, bias=bias, scratch=poisoned_scratch((outputs, tiling))) is out
    torch.testing.assert_close(out, linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    assert bool((behind == 7.0).all())


@pytest.mark.parametrize("tiling", [WHOLE, SPLIT], ids=("whole", "split"))
@pytest.mark.parametrize(("with_bias", "settled"), [(False, False), (True, True)])
def test_adds_to_what_is_there(tiling: SkinnyTiling, with_bias: bool, settled: bool) -> None:
    x, weight, bias = numbers(11, 88), numbers(50, 88), numbers(50) if with_bias else None
    out, behind = guarded(11, 50)
    expected = out.copy_(numbers(11, 50, seed=1)) + linear(x, weight, bias)
    skinny(x, weight, out, tiling, bias=bias, add=True, settled=settled, scratch=poisoned_scratch((50, tiling)))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert bool((behind == 7.0).all())


@pytest.mark.parametrize("block_n", [8, 32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated_activation(block_n: int, with_bias: bool) -> None:
    x, weight, bias = numbers(11, 72), numbers(2 * 42, 72), numbers(2 * 42) if with_bias else None
    out, behind = guarded(11, 42)
    skinny(x, weight, out, SkinnyTiling(block_n, 32, stages=2), bias=bias, glu=True)
    gate, up = linear(x, weight, bias).chunk(2, dim=-1)
    torch.testing.assert_close(out, silu(gate) * up, rtol=1e-4, atol=1e-4)
    assert bool((behind == 7.0).all())


def test_gated_activation_rounds_where_the_separate_kernel_does() -> None:
    # Half precision, which the interpreter knows. Multiples of 1 / 2048: sums are exact in float32, and too long for half.
    x, weight = numbers(5, 64).mul(32).round().div(2048).half(), numbers(2 * 32, 64).mul(32).round().half()
    out = torch.full((5, 32), torch.nan, dtype=torch.float16)
    skinny(x, weight, out, WHOLE, glu=True)
    wide = linear(x.float(), weight.float()).half()
    torch.testing.assert_close(out, gate_mul(wide, torch.full_like(out, torch.nan)), rtol=0.0, atol=0.0)


def test_products_that_split_share_one_scratch() -> None:
    """Of other sizes, and one with more parts than there are blocks of inputs; each starts over from counters at 0."""
    sizes = [
        (48, 96, SkinnyTiling(16, 32, stages=2, split=5)),
        (80, 130, SPLIT),
        (32, 64, SkinnyTiling(16, 32, stages=2, split=2)),
    ]
    scratch = poisoned_scratch(*[(outputs, tiling) for outputs, _, tiling in sizes])
    for rows in (16, 3):
        for outputs, inputs, tiling in sizes:
            x, weight = numbers(rows, inputs), numbers(outputs, inputs)
            out, _ = guarded(rows, outputs)
            skinny(x, weight, out, tiling, scratch=scratch)
            torch.testing.assert_close(out, linear(x, weight), rtol=1e-4, atol=1e-4)
            assert not scratch.arrived.any()


@pytest.mark.parametrize("scratch", [None, SplitScratch([(32, SPLIT)], CPU)], ids=("none", "small"))
def test_a_tiling_that_splits_needs_scratch_that_is_large_enough(scratch: SplitScratch | None) -> None:
    with pytest.raises(AssertionError):
        skinny(numbers(3, 96), numbers(96, 96), torch.empty(3, 96), SPLIT, scratch=scratch)


@pytest.mark.parametrize("model", MODELS)
def test_chosen_tilings_fit_the_device(model: str) -> None:
    for product in products_of(model):
        for rows in range(2, MAX_ROWS + 1):
            tiling = skinny_tiling(rows, product.outputs, product.inputs, glu=product.glu)
            if tiling is None:
                continue
            weight_rows = tiling.block_n * (2 if product.glu else 1)
            sizes = (weight_rows, tiling.block_k, tiling.warps)
            assert all(size >= 4 and size & (size - 1) == 0 for size in sizes)  # arange takes powers of two
            assert tiling.stages * 2 * tiling.block_k * (weight_rows + MAX_ROWS) <= MAX_SHARED_BYTES
            tiles = -(-product.outputs // tiling.block_n)
            assert tiling.split == 1 or (not product.glu and tiles * tiling.split <= NUM_MULTIPROCESSORS)


def test_few_rows_of_every_kind_of_product_are_ours_and_more_are_not() -> None:
    for product in products_of("qwen2.5-1.5b"):
        chosen = [
            rows for rows in range(1, 65) if skinny_tiling(rows, product.outputs, product.inputs, glu=product.glu)
        ]
        assert chosen == list(range(2, MAX_ROWS + 1))
