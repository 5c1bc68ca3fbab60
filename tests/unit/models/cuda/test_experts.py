"""Kernels of experts against torch: every option, sizes that do not divide evenly, outputs poisoned beforehand."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tonle.models.cuda import experts_grouped, experts_one_row, gemv, gpu_features, matrix
from tonle.models.cuda.experts import CudaExperts, ExpertScratch
from tonle.models.cuda.experts_gate import EXPERT_GATES
from tonle.models.cuda.experts_grouped import (
    GroupedTiling,
    Routed,
    add_up,
    changes,
    fitting,
    grouped_down,
    grouped_gate_up,
    grouped_tiling,
    most_tiles,
)
from tonle.models.cuda.experts_one_row import OneRowTiling, down_tiling, gate_up_tiling, one_row_down, one_row_gate_up
from tonle.models.cuda.experts_routing import assign
from tonle.models.cuda.experts_weights import ExpertWeights
from tonle.models.cuda.matrix import Norm
from tonle.models.cuda.skinny import SkinnyTiling
from tonle.models.experts import Experts, Perceptron, gated
from tonle.models.layers import Linear, LinearPart, Quantized
from tonle.models.spec import MixerSpec

pytestmark = pytest.mark.crossed

HIDDEN, SIZE, EPS = 96, 40, 1e-6
SPEC = MixerSpec(kind="experts", size=SIZE, num_experts=5, experts_per_token=2)
BIASED = dataclasses.replace(SPEC, bias=True, activation="swigluoai", clamp=0.7, router_bias=True)
TILING = GroupedTiling(
    32, 16, 32, stages=2
)  # the interpreter's time is that of programs: few, and sizes do not divide evenly
ONE_ROW = OneRowTiling(16, 32, warps=1, ahead=3)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """With NaN behind them: whatever is read past the end shows."""
    whole = torch.full((shape[0] + 2, *shape[1:]), torch.nan)
    return whole[: shape[0]].normal_(generator=torch.Generator().manual_seed(seed + sum(shape)))


def count(number: int) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int32)


def routed(logits: torch.Tensor, spec: MixerSpec, live: int) -> Routed:
    """What `assign` finds, in poisoned memory."""
    tokens, experts, top = len(logits), spec.num_experts, spec.experts_per_token
    lists, shares = torch.full((experts, tokens + 3), -7, dtype=torch.int32), torch.full((tokens * top,), torch.nan)
    found = Routed(torch.full((experts,), -7, dtype=torch.int32), lists, shares)
    assign(logits, count(live), *found, top=top, normed=spec.normed_shares)
    return found


def best(logits: torch.Tensor, top: int) -> list[int]:
    """Of equals the first."""
    return sorted(range(len(logits)), key=lambda e: (-float(logits[e]), e))[:top]


@pytest.mark.parametrize(("tokens", "live", "experts", "top", "width", "normed"), [
    (2, 2, 5, 2, 16, True), (70, 67, 11, 3, 16, True), (9, 0, 3, 1, 16, True), (70, 67, 8, 8, 8, False), (6, 5, 3, 1, 16, False),
])  # fmt: skip
def test_tokens_are_assigned_to_their_experts(
    tokens: int, live: int, experts: int, top: int, width: int, normed: bool
) -> None:
    spec = MixerSpec(kind="experts", size=16, num_experts=experts, experts_per_token=top, normed_shares=normed)
    logits = numbers(tokens, width).mul(4).round()  # many are equal
    found = routed(logits, spec, live)
    lists: list[list[int]] = [[] for _ in range(experts)]
    for t in range(live):
        chosen = best(logits[t, :experts], top)
        for rank, expert in enumerate(chosen):
            lists[expert].append(t * top + rank)
        shares = found.shares[t * top : (t + 1) * top]
        expected = logits[t, :experts].softmax(-1)[chosen]
        if normed:
            shares, expected = shares / shares.sum(), expected / expected.sum()
        torch.testing.assert_close(shares, expected)
    assert found.counts.tolist() == [len(pairs) for pairs in lists]
    for own, pairs in zip(found.lists.tolist(), lists, strict=True):
        assert own == pairs + [-7] * (len(own) - len(pairs))
    assert bool(found.shares[live * top :].isnan().all())


class Weights:
    """Experts as kernels take them."""

    def __init__(self, spec: MixerSpec) -> None:
        experts, size = spec.num_experts, spec.size
        gate_up_bias = numbers(experts, 2 * size, seed=1) if spec.bias else None
        down_bias = numbers(experts, HIDDEN, seed=2) if spec.bias else None
        self.gate_up = ExpertWeights(numbers(experts, 2 * size, HIDDEN).mul_(HIDDEN**-0.5), gate_up_bias)
        self.down = ExpertWeights(numbers(experts, HIDDEN, size).mul_(size**-0.5), down_bias)


def product(weights: ExpertWeights, expert: int, x: torch.Tensor) -> torch.Tensor:
    return linear(x, weights.weight[expert], None if weights.bias is None else weights.bias[expert])


def inner(weights: Weights, spec: MixerSpec, expert: int, x: torch.Tensor) -> torch.Tensor:
    return gated(product(weights.gate_up, expert, x)[None], spec.activation, spec.clamp)[0]


@pytest.mark.parametrize("spec", [SPEC, BIASED, *(dataclasses.replace(SPEC, activation=a) for a in EXPERT_GATES if a in (
    "gelu", "gelu_tanh", "relu2"))], ids=lambda spec: spec.activation)  # fmt: skip
@pytest.mark.parametrize(("tokens", "live"), [(2, 1), (21, 19)])
def test_grouped_products(spec: MixerSpec, tokens: int, live: int) -> None:
    weights, x, top = Weights(spec), numbers(tokens, HIDDEN), spec.experts_per_token
    found = routed(numbers(tokens, 16, seed=3), spec, live)
    active, given = torch.full((tokens * top, SIZE), torch.nan), torch.full((tokens * top, HIDDEN), torch.nan)
    grouped_gate_up(x, weights.gate_up, found, spec, active, TILING)
    grouped_down(active, weights.down, found, given, TILING)
    for expert, own in enumerate(found.lists.tolist()):
        for pair in own[: int(found.counts[expert])]:
            expected = inner(weights, spec, expert, x[pair // top])
            torch.testing.assert_close(active[pair], expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(given[pair], product(weights.down, expert, expected), rtol=1e-4, atol=1e-5)
    assert bool(active[live * top :].isnan().all()) and bool(given[live * top :].isnan().all())


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_what_experts_give_is_added_up(add: bool, gate: bool, normed: bool) -> None:
    spec = dataclasses.replace(
        SPEC, num_experts=6, experts_per_token=3, shared_size=16, shared_gate=gate, normed_shares=normed
    )
    logits, given, shared, out = numbers(4, 16), numbers(4 * 3, HIDDEN), numbers(4, HIDDEN), numbers(4, HIDDEN, seed=1)
    found, before = routed(logits, spec, 3), out.clone()
    add_up(given, found, shared, logits, count(3), spec, out, add=add)
    for t in range(3):
        shares = found.shares[t * 3 : t * 3 + 3]
        expected = (shares / shares.sum() if normed else shares) @ given[t * 3 : t * 3 + 3]
        expected += shared[t] * (logits[t, 6].sigmoid() if gate else 1)
        torch.testing.assert_close(out[t], expected + before[t] if add else expected)
    torch.testing.assert_close(out[3], before[3])


LOOPED = OneRowTiling(32, 16, warps=1, stages=2)


@pytest.mark.parametrize(("spec", "second", "add", "settled", "normed"), [
    (SPEC, ONE_ROW, True, True, True),
    (BIASED, ONE_ROW, True, False, False),
    (dataclasses.replace(SPEC, normed_shares=False), LOOPED, False, False, True),
    (dataclasses.replace(SPEC, shared_size=16, shared_gate=True), ONE_ROW, True, True, True),
    (dataclasses.replace(SPEC, shared_size=16, experts_per_token=5), LOOPED, True, True, False),
])  # fmt: skip
def test_one_row(spec: MixerSpec, second: OneRowTiling, add: bool, settled: bool, normed: bool) -> None:
    weights, top = Weights(spec), spec.experts_per_token
    x, gain = numbers(1, HIDDEN), numbers(HIDDEN)
    logits = numbers(1, 16).mul(2).round()  # some are equal
    active, out = torch.full((top, SIZE), torch.nan), numbers(1, HIDDEN, seed=5)
    shared, before = numbers(1, HIDDEN, seed=6) if spec.shared_size else None, out.clone()
    one_row_gate_up(x, logits, weights.gate_up, spec, active, gain=gain if normed else None, eps=EPS,
                    tiling=ONE_ROW)  # fmt: skip
    one_row_down(active, logits, weights.down, shared, spec, out, add=add, settled=settled, tiling=second)
    seen = x * (x.square().mean() + EPS).rsqrt() * gain if normed else x
    chosen = best(logits[0, : spec.num_experts], top)
    shares = logits[0, : spec.num_experts].softmax(-1)[chosen]
    expected = before[0] if add else torch.zeros(HIDDEN)
    for place, (expert, share) in enumerate(
        zip(chosen, shares / (shares.sum() if spec.normed_shares else 1), strict=True)
    ):
        torch.testing.assert_close(active[place], inner(weights, spec, expert, seen[0]), rtol=1e-4, atol=1e-5)
        expected = expected + share * product(weights.down, expert, active[place])
    if shared is not None:
        expected = expected + shared[0] * (logits[0, spec.num_experts].sigmoid() if spec.shared_gate else 1)
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-5)


def test_one_row_of_logits_that_are_no_numbers_reads_no_foreign_memory() -> None:
    """Padding may hold anything. Expert E - 1 at most is read: beyond it lie NaN, which nothing else would bring here."""
    weights, active, out = Weights(SPEC), torch.zeros(2, SIZE), torch.zeros(1, HIDDEN)
    for bad in (-1, 0x7FFFFFFF, -8388608):  # NaN of either sign, and minus infinity
        logits = torch.full((1, 16), bad, dtype=torch.int32).view(torch.float32)
        one_row_gate_up(numbers(1, HIDDEN), logits, weights.gate_up, SPEC, active, tiling=ONE_ROW)
        assert bool(active.isfinite().all())
        one_row_down(active, logits, weights.down, None, SPEC, out, add=False, tiling=ONE_ROW)


# -- a layer's


def experts_of(spec: MixerSpec, *, parts: int = 1) -> Experts:
    """The reference. `parts`: 2 where gate and up are apart, as in a live model."""

    def made(rows: int, columns: int, seed: int, *, bias: bool, apart: bool = False) -> Linear:
        weight, vector = numbers(rows, columns, seed=seed) * columns**-0.5, numbers(rows, seed=seed + 1)
        halves = zip(weight.chunk(2), vector.chunk(2), strict=True) if apart else [(weight, vector)]
        return Linear(*(LinearPart(w.clone(), v.clone() if bias else None) for w, v in halves))

    def perceptron(size: int, seed: int, bias: bool) -> Perceptron:
        up = made(2 * size, HIDDEN, seed, bias=bias, apart=parts == 2)
        return Perceptron(up, made(HIDDEN, size, seed + 1, bias=bias))

    perceptrons = [perceptron(spec.size, 10 * e, spec.bias) for e in range(spec.num_experts)]
    shared = perceptron(spec.shared_size, 999, False) if spec.shared_size else None
    gate = made(1, HIDDEN, 888, bias=False) if spec.shared_gate else None
    return Experts(made(spec.num_experts, HIDDEN, 777, bias=spec.router_bias), perceptrons, spec, shared, gate)


@pytest.fixture
def small_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_grouped, "grouped_tiling", lambda *_, **__: TILING)
    monkeypatch.setattr(experts_one_row, "gate_up_tiling", lambda *_: ONE_ROW)
    monkeypatch.setattr(experts_one_row, "down_tiling", lambda *_: ONE_ROW)
    monkeypatch.setattr(gemv, "gemv_tiling", lambda *_, **__: gemv.GemvTiling(32, 64, warps=1))
    monkeypatch.setattr(
        matrix, "skinny_tiling", lambda rows, *_, **__: SkinnyTiling(32, 64, stages=2) if rows == 3 else None
    )


LAYERS = {
    "plain": SPEC,
    "biases": BIASED,
    "shared": dataclasses.replace(SPEC, shared_size=16),
    "gate": dataclasses.replace(SPEC, shared_size=32, shared_gate=True),
}


@pytest.mark.usefixtures("small_tilings")
@pytest.mark.parametrize(("spec", "parts"), list(zip(LAYERS.values(), (1, 2, 1, 2), strict=True)), ids=LAYERS)
def test_a_layer_is_what_the_reference_is(spec: MixerSpec, parts: int) -> None:
    """Several numbers of rows in one scratch; the reference itself runs on the memory that was moved."""
    reference = experts_of(spec, parts=parts)
    before = reference(numbers(3, HIDDEN))
    layer = CudaExperts.of(reference, spec, torch.float32)
    torch.testing.assert_close(reference(numbers(3, HIDDEN)), before, rtol=0, atol=0)
    layer.scratch = ExpertScratch([layer], 12)
    norm = Norm(torch.rand(HIDDEN) + 0.5, EPS, torch.full((12, HIDDEN), torch.nan))
    for rows, live in ((12, 11), (1, 1), (3, 3)):
        hidden = numbers(rows, HIDDEN, seed=rows)
        seen = hidden * (hidden.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.gain
        expected = hidden + reference(seen)
        layer.mix(hidden, norm, count(live))
        layer.add(hidden, count(live))
        torch.testing.assert_close(hidden[:live], expected[:live], rtol=1e-4, atol=1e-5)


def test_weights_that_lie_side_by_side_are_not_copied() -> None:
    whole, bias = torch.randn(3, 8, 4), torch.randn(3, 8)
    maps = [Linear(LinearPart(w[:5], b[:5]), LinearPart(w[5:], b[5:])) for w, b in zip(whole, bias, strict=True)]
    found = ExpertWeights.of(maps, torch.float32)
    assert found.weight.data_ptr() == whole.data_ptr() and torch.equal(found.weight, whole)
    assert found.bias is not None and torch.equal(found.bias, bias)
    swapped = ExpertWeights.of([maps[1], maps[0]], torch.float32).weight
    assert torch.equal(swapped, whole[[1, 0]]) and torch.equal(maps[0].parts[0].dense, whole[0, :5])
    assert maps[0].parts[0].dense.data_ptr() == swapped[1].data_ptr()


def test_weights_of_few_bits_that_no_kernel_reads_are_unpacked() -> None:
    """Groups of two inputs."""
    stored = [Quantized(torch.randint(-9, 9, (6, 4), dtype=torch.int8), torch.rand(6, 2)) for _ in range(2)]
    expected = torch.stack([one.unpacked(torch.float32) for one in stored])
    found = ExpertWeights.of([Linear(LinearPart(one)) for one in stored], torch.float32)
    assert found.packed is None and torch.equal(found.weight, expected)


def few_bits(rows: int, columns: int, form: str, seed: int) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if form == "fp8" else columns // 32
    scale = (torch.rand(rows, groups, generator=generator) + 0.5) * columns**-0.5
    whole = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    if form == "int4":
        return Quantized(whole, scale * 0.2, scale * -1.5, bits=4)
    if form == "table":
        return Quantized(whole, scale, table=torch.linspace(-1, 1, 16) ** 3, bits=4)
    numbers_ = torch.randn(rows, columns, generator=generator)
    return Quantized((numbers_ * 40).to(torch.int8), scale / 40) if form == "int8" else Quantized(
        numbers_.to(torch.float8_e4m3fn), scale)  # fmt: skip


@pytest.mark.usefixtures("small_tilings")
@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "table"])
def test_experts_of_few_bits(form: str) -> None:
    """As their unpacked weights are, with one row and several; the reference then runs on the packed memory."""
    spec = dataclasses.replace(BIASED, size=64, num_experts=3)
    reference = experts_of(spec)
    for seed, expert in enumerate(reference.experts):
        for map_ in (expert.gate_up, expert.down):
            map_.parts[0].weight = few_bits(*map_.parts[0].weight.shape, form, seed)
    x = numbers(5, HIDDEN)
    expected = reference(x)
    layer = CudaExperts.of(reference, spec, torch.float32)
    assert layer.gate_up.packed is not None and layer.down.packed is not None
    torch.testing.assert_close(reference(x), expected, rtol=1e-5, atol=1e-6)
    layer.scratch = ExpertScratch([layer], 5)
    for rows, live in ((5, 4), (1, 1)):
        out = torch.zeros(rows, HIDDEN)
        layer.mix(x[:rows].clone(), None, count(live))
        layer.add(out, count(live))
        torch.testing.assert_close(out[:live], expected[:live], rtol=1e-4, atol=1e-5)


# -- how products are cut


def test_there_is_room_for_every_distribution_of_pairs() -> None:
    rng = random.Random(0)
    for _ in range(300):
        experts, block = rng.randint(1, 20), rng.choice((16, 32, 64))
        top, tokens = rng.randint(1, experts), rng.randint(1, 80)
        favourite = rng.sample(range(experts), top)
        counts = [0] * experts
        for _ in range(tokens):
            for expert in favourite if rng.random() < 0.5 else rng.sample(range(experts), top):
                counts[expert] += 1
        tiles = sum(-(-number // block) for number in counts)
        assert tiles <= most_tiles(tokens * top, experts, block) <= tokens * top


@pytest.mark.parametrize(("experts", "top"), [(128, 8), (8, 2), (60, 4), (5, 2)])
def test_kernels_change_where_it_is_said(experts: int, top: int) -> None:
    spec = dataclasses.replace(SPEC, num_experts=experts, experts_per_token=top)
    for glu in (True, False):
        tilings = [grouped_tiling(rows * top, experts, glu=glu) for rows in range(1, 5000)]
        assert {rows for rows in range(2, 5000) if tilings[rows - 1] != tilings[rows - 2]} <= changes(spec)


@pytest.mark.parametrize("glu", [True, False])
@pytest.mark.parametrize("kib", [99, 163, 227], ids=["A10G", "A100", "H200"])
def test_chosen_tilings_fit_the_device(kib: int, glu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_features, "shared_bytes", lambda: kib * 1024)
    for pairs in (16, 800, 2048, 8192, 32768):
        wanted = grouped_tiling(pairs, 128, glu=glu)
        for element_size in (2, 4):
            tiling = fitting(wanted, glu=glu, element_size=element_size)
            turn = tiling.block_k * (tiling.block_n * (2 if glu else 1) + tiling.block_m) * element_size
            assert tiling.stages * turn < kib * 1024 and tiling.stages >= 2 and tiling.block_k >= 16
            assert all(size & (size - 1) == 0 for size in (tiling.block_n, tiling.block_m, tiling.block_k))
        if kib == 227:
            assert fitting(wanted, glu=glu, element_size=2) == wanted


@pytest.mark.parametrize(
    ("hidden", "size", "top"), [(2048, 768, 8), (4096, 14336, 2), (2880, 2880, 4), (2048, 1408, 4)]
)
def test_products_of_one_row_are_not_unrolled_without_end(hidden: int, size: int, top: int) -> None:
    tilings: list[Any] = [gate_up_tiling(size, hidden), down_tiling(hidden, size, top)]
    assert all(tiling.block_k & (tiling.block_k - 1) == 0 for tiling in tilings)
    assert tilings[1].stages or top * -(-size // tilings[1].block_k) <= 40
