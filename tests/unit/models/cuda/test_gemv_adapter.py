"""One row with a LoRA adapter inside its products: against float32 with merged weights, over many calls on one scratch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tonle.models.cuda.gemv import GemvTiling, gemv
from tonle.models.cuda.gemv_adapter import EMPTY, PLACES, OneRowAdapter, OneRowScratch

SLOTS = 3
EPS = 1e-5
CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.float16: {"rtol": 1e-2, "atol": 2e-2}}


@dataclass(frozen=True)
class Shape:
    """A product of a small layer."""

    place: str
    inputs: int
    sizes: tuple[int, ...]  # outputs of each module
    bias: bool = False

    @property
    def glu(self) -> bool:
        return self.place == "gate_up"

    @property
    def norm(self) -> bool:
        return self.place in ("qkv", "gate_up")


# 40 and 72 inputs end within a block of 32, as 22 gated outputs do within a tile of 4.
LAYER = [Shape("qkv", 40, (32, 16, 16), bias=True), Shape("o", 32, (40,)), Shape("gate_up", 40, (22, 22), bias=True),
         Shape("down", 72, (40,))]  # fmt: skip


class Product:
    """A product of the layer with its weights, as the model would keep them: A behind the rows of W."""

    def __init__(self, shape: Shape, scratch: OneRowScratch, *, dtype: torch.dtype, fused: bool = True, seed: int = 0):
        self.shape, self.slot = shape, torch.tensor([-1], dtype=torch.int32)
        self._rng = torch.Generator().manual_seed(seed + 7 * len(shape.place))
        rank, modules, outputs = scratch.rank, len(shape.sizes), sum(shape.sizes)
        wide = self.numbers(outputs + SLOTS * modules * rank, shape.inputs).to(dtype) / 8
        self.weight = wide[:outputs]
        self.b = (self.numbers(SLOTS, outputs, rank) / rank).to(dtype)
        self.a = wide[outputs:].view(SLOTS, modules * rank, shape.inputs)
        self.gain = (self.numbers(shape.inputs).abs() + 0.5).to(dtype) if shape.norm else None
        self.bias = self.numbers(outputs).to(dtype) if shape.bias else None
        self.adapter = OneRowAdapter(self.slot, self.a, self.b, shape.sizes, scratch, shape.place, fused=fused)

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._rng)

    def merged(self, slot: int) -> torch.Tensor:
        """W + B A of every module, float32."""
        parts = list(self.weight.float().split(self.shape.sizes))
        if slot >= 0:
            rank, begin = self.b.shape[2], 0
            for module, size in enumerate(self.shape.sizes):
                a = self.a[slot, module * rank : (module + 1) * rank].float()
                parts[module] = parts[module] + self.b[slot, begin : begin + size].float() @ a
                begin += size
        return torch.cat(parts)

    def check(self, slot: int, *, tiling: GemvTiling | None = None) -> None:
        """One call, its output poisoned (or, where the product adds, given) beforehand."""
        shape, dtype = self.shape, self.weight.dtype
        x = self.numbers(1, shape.inputs).to(dtype)
        self.slot.fill_(slot)
        normed = x.float() if self.gain is None else rms_norm(x.float(), (shape.inputs,), self.gain.float(), EPS)
        expected = linear(normed, self.merged(slot), None if self.bias is None else self.bias.float())
        if shape.glu:
            gate, up = expected.chunk(2, dim=-1)
            expected = silu(gate) * up
        out = torch.full_like(expected, torch.nan).to(dtype)
        if add := not shape.norm:
            out = self.numbers(*expected.shape).to(dtype)
            expected = expected + out.float()
        gemv(x, self.weight, out, gain=self.gain, eps=EPS, bias=self.bias, add=add, settled=shape.place == "down",
             glu=shape.glu, tiling=tiling, adapter=self.adapter)  # fmt: skip
        torch.testing.assert_close(out.float(), expected, **CLOSE[dtype])


def layer(scratch: OneRowScratch, *, dtype: torch.dtype = torch.float32, fused: bool = True) -> list[Product]:
    return [Product(shape, scratch, dtype=dtype, fused=fused) for shape in LAYER]


CASES = [
    (None, 16, torch.float32),
    (GemvTiling(4, 32, warps=2), 64, torch.float16),
    (GemvTiling(2, 32, warps=1, ahead=2), 16, torch.float16),
    (GemvTiling(8, 32, warps=4, stages=2), 64, torch.float32),
]


@pytest.mark.parametrize(("tiling", "rank", "dtype"), CASES, ids=str)
def test_an_adapter_is_the_merged_weight(tiling: GemvTiling | None, rank: int, dtype: torch.dtype) -> None:
    for product in layer(OneRowScratch(rank, torch.device("cpu")), dtype=dtype):
        product.check(1, tiling=tiling)


@pytest.mark.parametrize("rank", [1, 6])
def test_ranks_that_are_few_or_no_power_of_two(rank: int) -> None:
    for product in layer(OneRowScratch(rank, torch.device("cpu"))):
        product.check(2)


@pytest.mark.parametrize(("fused", "slots"), [(True, (0, -1, 2, 1, -1, 0)), (False, (0, 1))])
def test_steps_with_changing_slots_on_one_scratch(fused: bool, slots: tuple[int, ...]) -> None:
    """Between launches only the last one's place is full: each finds its own EMPTY, or it could take an old y for its own."""
    scratch = OneRowScratch(4, torch.device("cpu"))
    qkv, *rest = layer(scratch, fused=fused)
    for slot in slots:
        steps = [qkv, *rest] if slot != 2 else rest  # a step with prompts only finishes its last layer by one row
        for product in steps:
            place = PLACES.index(product.shape.place)
            assert bool((scratch.words[place] == EMPTY).all())
            product.check(slot)
            filled = (scratch.words != EMPTY).sum(dim=(1, 2))  # words of each place, in all copies
            expected = torch.zeros(len(PLACES), dtype=torch.int64)
            expected[place] = scratch.words.shape[1] * len(product.shape.sizes) * scratch.rank
            assert torch.equal(filled, expected)


def test_without_a_slot_nothing_of_the_adapters_is_read() -> None:
    """Slots that hold no adapter may hold anything, NaN too."""
    for product in layer(OneRowScratch(16, torch.device("cpu"))):
        product.a.fill_(torch.nan)
        product.b.fill_(torch.nan)
        product.check(-1)


def test_two_products_in_a_row_at_one_place_are_refused() -> None:
    """The second would find the first one's y."""
    product = Product(LAYER[1], OneRowScratch(16, torch.device("cpu")), dtype=torch.float32)
    product.check(0)
    with pytest.raises(AssertionError, match="two products in a row use the place of o"):
        product.check(0)


def test_a_sum_that_looks_like_an_empty_word_is_another_nan() -> None:
    """Otherwise all readers would wait for it without end. No arithmetic gives these bits; a move of a weight could."""
    scratch = OneRowScratch(1, torch.device("cpu"))
    product = Product(LAYER[1], scratch, dtype=torch.float32)
    product.slot.fill_(0)
    product.a.view(torch.int32)[0].fill_(EMPTY)
    out = torch.zeros(1, 40)
    gemv(torch.ones(1, 32), product.weight, out, add=True, adapter=product.adapter)
    assert bool(out.isnan().all()) and not bool((scratch.words[1, :, 0] == EMPTY).any())
