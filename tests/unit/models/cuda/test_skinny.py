"""A matrix times some rows against torch: every option, sizes that do not divide evenly, outputs poisoned beforehand."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu_cuts import cuts_to_try
from benchmarks.gpu_products import products_of
from benchmarks.gpu_rehearsal import MAX_ERROR, Rehearsal, Scene, Weights, check
from torch.nn.functional import linear, silu

from tonle.models.cuda.pointwise import silu_mul
from tonle.models.cuda.skinny import SplitScratch, skinny
from tonle.models.cuda.skinny_cuts import Cut, cut_for

CPU = torch.device("cpu")
CUTS = [
    Cut(16, 16, 32, warps=4, stages=3),
    Cut(32, 16, 32, warps=4, stages=3, split=3),
    Cut(16, 32, 64, warps=4, stages=2, ahead=256),
    Cut(32, 16, 32, warps=4, stages=3, tma=True),
]
SHAPES = {  # (outputs, inputs, glu) of the models the cuts were chosen for
    "qwen2.5-1.5b": ((2048, 1536, False), (1536, 1536, False), (8960, 1536, True), (1536, 8960, False)),
    "llama-3.2-3b": ((5120, 3072, False), (3072, 3072, False), (8192, 3072, True), (3072, 8192, False)),
}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def scratch_for(cut: Cut, rows: int, outputs: int, *, glu: bool = False) -> SplitScratch:
    """Parts start as NaN: one that is read before it was written shows."""
    made = SplitScratch(cut.num_parts(rows, outputs, glu=glu), cut.num_tiles(rows, outputs), CPU)
    made.parts.fill_(torch.nan)
    return made


def guarded(rows: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An output full of NaN and the rows behind it, which nobody may touch."""
    whole = torch.full((rows + 2, outputs), torch.nan)
    whole[rows:] = 7.0
    return whole[:rows], whole[rows:]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(2, 32, 64), (16, 40, 72), (35, 56, 88)])
def test_bias(cut: Cut, rows: int, outputs: int, inputs: int) -> None:
    x, weight, bias = numbers(rows, inputs), numbers(outputs, inputs), numbers(outputs)
    out, behind = guarded(rows, outputs)
    skinny(x, weight, out, cut, bias=bias, scratch=scratch_for(cut, rows, outputs))
    torch.testing.assert_close(out, linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    assert bool((behind == 7.0).all())


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_adds_to_what_is_there(cut: Cut) -> None:
    x, weight, bias, out = numbers(19, 96), numbers(50, 96), numbers(50), numbers(19, 50, seed=1)
    expected = out + linear(x, weight, bias)
    skinny(x, weight, out, cut, bias=bias, add=True, scratch=scratch_for(cut, 19, 50))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_gated_activation(cut: Cut, with_bias: bool) -> None:
    if cut.tma and cut.split > 1:
        pytest.skip("not offered")
    x, weight, bias = numbers(19, 72), numbers(2 * 40, 72), numbers(2 * 40) if with_bias else None
    out, behind = guarded(19, 40)
    skinny(x, weight, out, cut, bias=bias, glu=True, scratch=scratch_for(cut, 19, 40, glu=True))
    gate, up = linear(x, weight, bias).chunk(2, dim=-1)
    torch.testing.assert_close(out, silu(gate) * up, rtol=1e-4, atol=1e-4)
    assert bool((behind == 7.0).all())


@pytest.mark.parametrize("cut", [CUTS[0], CUTS[3]], ids=str)
def test_gated_activation_rounds_where_the_separate_kernel_does(cut: Cut) -> None:
    # Half precision, which the interpreter knows; whole numbers, so that both sums are exact before they are rounded.
    x, weight = numbers(5, 64).mul(8).round().half(), numbers(2 * 32, 64).mul(8).round().half()
    x /= 512
    out = torch.full((5, 32), torch.nan, dtype=torch.float16)
    skinny(x, weight, out, cut, glu=True)
    wide = linear(x.float(), weight.float()).half()
    torch.testing.assert_close(out, silu_mul(wide, torch.full_like(out, torch.nan)), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("tma", [False, True])
def test_split_tiles_start_over_and_repeat_themselves(tma: bool) -> None:
    """More parts than there are blocks of inputs, two row tiles, and one scratch for two products of different sizes."""
    cut = Cut(16, 16, 32, warps=4, stages=2, split=5, tma=tma)
    scratch = scratch_for(cut, 20, 48)
    for outputs in (48, 32, 48):
        x, weight = numbers(20, 96), numbers(outputs, 96)
        out, _ = guarded(20, outputs)
        skinny(x, weight, out, cut, scratch=scratch)
        torch.testing.assert_close(out, linear(x, weight), rtol=1e-4, atol=1e-4)
        assert not scratch.arrived.any()
        again, _ = guarded(20, outputs)
        assert torch.equal(skinny(x, weight, again, cut, scratch=scratch), out)


def test_a_cut_that_splits_needs_scratch_that_is_large_enough() -> None:
    cut = Cut(16, 16, 32, warps=4, stages=2, split=2)
    with pytest.raises(AssertionError):
        skinny(numbers(3, 64), numbers(32, 64), torch.empty(3, 32), cut, scratch=SplitScratch(16, 2, CPU))


def fits(cut: Cut, *, glu: bool) -> bool:
    """Powers of two, whole cache lines ahead, and blocks under way that have room in shared memory: 227 KiB per program."""
    sizes = (cut.block_n, cut.block_m, cut.block_k, cut.warps, max(64, cut.ahead))
    weight_rows = cut.block_n * (2 if glu else 1)
    buffers = cut.stages - (1 if weight_rows < 64 else 0)  # mma.sync needs one less
    return (
        all(size >= 4 and size & (size - 1) == 0 for size in sizes)
        and buffers * 2 * cut.block_k * (cut.block_m + weight_rows) <= 227 * 1024
        and not (cut.tma and (cut.ahead or (glu and cut.split > 1)))
    )


@pytest.mark.parametrize("model", SHAPES)
def test_chosen_cuts_fit_the_device(model: str) -> None:
    for outputs, inputs, glu in SHAPES[model]:
        for rows in range(2, 257):
            cut = cut_for(rows, outputs, inputs, glu=glu)
            assert cut is None or fits(cut, glu=glu)


@pytest.mark.parametrize("model", SHAPES)
def test_cuts_to_try_fit_the_device(model: str) -> None:
    products = products_of(model)
    assert tuple((product.outputs, product.inputs, product.glu) for product in products) == SHAPES[model]
    for product in products:
        for rows in (2, 16, 32, 64, 100, 192, 256):
            cuts = cuts_to_try(product, rows)
            assert len(cuts) >= 6 and all(fits(cut, glu=product.glu) for cut in cuts)


@pytest.mark.parametrize("index", range(4))
def test_the_benchmark_tells_right_from_wrong(index: int) -> None:
    product = products_of("tiny")[index]
    weights = Weights(product, 3, CPU)
    scene = Scene(weights, 5)
    assert scene.error(scene.cublas) < MAX_ERROR
    assert not scene.error(lambda weight, out: None) < MAX_ERROR
    assert not scene.error(lambda weight, out: scene.cublas(weights.copies[0], out)) < MAX_ERROR
    assert check(Rehearsal(product, cuts_to_try(product, 5)[0], (5,)), weights) is None


def test_scratch_is_enough_for_every_number_of_rows() -> None:
    shapes = [shape for shapes in SHAPES.values() for shape in shapes]
    scratch = SplitScratch.enough_for(shapes, 256, CPU)
    cuts = [(cut_for(rows, *shape[:2], glu=shape[2]), rows, shape) for shape in shapes for rows in (2, 16, 100, 256)]
    for cut, rows, (outputs, _, glu) in cuts:
        if cut is not None:
            assert cut.num_parts(rows, outputs, glu=glu) <= scratch.parts.numel()
            assert cut.split == 1 or cut.num_tiles(rows, outputs) <= scratch.arrived.numel()
