"""Experts in the compiled step: routing, and every kind of mixture against torch on the same random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.adapters import random_adapter
from tests.fakes.cpu_models import RandomModel, plain_layer, spec_of, step_of
from tests.unit.models.cpu.test_layer_kinds import logits_of
from tonle.models.cpu.cpu_adapters import CpuAdapters
from tonle.models.cpu.cpu_experts import choose, sort_rows
from tonle.models.cpu.dots import HAS_DOTS
from tonle.models.cpu.layout import layout
from tonle.models.cpu.low_rank import RANK
from tonle.models.cpu.pack import why_not
from tonle.models.cpu.stored import Stored
from tonle.models.cpu.team import Team
from tonle.models.spec import LayerSpec, ModelSpec

PLAIN = plain_layer()


def experts(layer: LayerSpec = PLAIN, **mixer: Any) -> LayerSpec:
    given = {"kind": "experts", "size": 64, "num_experts": 7, "experts_per_token": 3, **mixer}
    return replace(layer, mixer=replace(layer.mixer, **given))


KINDS: dict[str, ModelSpec] = {
    "experts": spec_of(experts(), experts()),
    "shares as they are": spec_of(experts(normed_shares=False), experts(normed_shares=False)),
    "between perceptrons": spec_of(PLAIN, experts(), PLAIN),
    "a shared one": spec_of(experts(shared_size=96), PLAIN),
    "a gated shared one": spec_of(*[experts(shared_size=96, shared_gate=True)] * 2),
    "as in gpt-oss": spec_of(
        *[experts(replace(PLAIN, attention=replace(PLAIN.attention, sinks=True)), bias=True, router_bias=True,
                  activation="swigluoai", clamp=0.7)] * 2
    ),
    "biases": spec_of(experts(bias=True), PLAIN),
    "norms after": spec_of(*[experts(replace(PLAIN, norm_after=True), shared_size=96)] * 2),
    "parallel": spec_of(*[experts(replace(PLAIN, residual="parallel"))] * 2),
    "gelu": spec_of(*[experts(activation="gelu_tanh")] * 2),
    "one of many": spec_of(*[experts(num_experts=70, experts_per_token=1)] * 2),
    "all": spec_of(*[experts(experts_per_token=7)] * 2),
}  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_step_equals_torch(kind: str) -> None:
    spec = KINDS[kind]
    assert why_not(spec) is None
    model = RandomModel(spec)
    expected, found = logits_of(model.torch(), model), logits_of(model.fast(team=Team(2)), model)
    assert float((found - expected).norm() / expected.norm()) < 1e-3
    assert float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().max()) < 2e-2


@torch.inference_mode()
@pytest.mark.parametrize(
    ("kind", "change"),
    [("experts", {"normed_shares": False}), ("experts", {"experts_per_token": 2}), ("a shared one", {"shared_size": 0}),
     ("a gated shared one", {"shared_gate": False}), ("as in gpt-oss", {"clamp": 3.0}), ("as in gpt-oss", {"bias": False}),
     ("as in gpt-oss", {"router_bias": False}), ("gelu", {"activation": "silu"})],
)  # fmt: skip
def test_each_difference_is_seen(kind: str, change: dict[str, Any]) -> None:
    model = RandomModel(KINDS[kind])
    expected = logits_of(model.torch(), model)
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, **change)) if layer.mixer.kind == "experts" else layer
        for layer in model.spec.layers
    )
    model.spec = replace(model.spec, layers=layers)
    difference = (logits_of(model.fast(), model) - expected).norm() / expected.norm()
    assert float(difference) > 1e-2


@pytest.mark.skipif(
    not HAS_DOTS, reason="4-bit weights multiplied as floats round differently with one row and with several"
)
@torch.inference_mode()
def test_the_same_bits_in_any_company() -> None:
    """Of a token that is decoded alone, and beside prompts that share its experts."""
    model = RandomModel(KINDS["a gated shared one"])
    decoder, kv = model.fast(team=Team(2)), model.cache()
    tokens = [torch.arange(40) * step % 200 for step in (7, 11, 13)]
    decoder.forward(step_of([(0, 30), (0, 20)], tokens=tokens[:2]), kv)
    alone = decoder.forward(step_of([(30, 31)], tokens=tokens[:1]), kv)[0].clone()
    beside = step_of([(30, 31), (20, 40), (0, 40)], tokens=tokens)
    assert torch.equal(decoder.forward(beside, kv)[0], alone)


def test_adapters_beside_experts() -> None:
    """Of attention in every layer; of the mixer where it is a perceptron."""
    spec = spec_of(experts(shared_size=96), PLAIN, experts(shared_size=96))
    adapters = CpuAdapters(spec, 1, 8)
    adapters.set_adapter(0, random_adapter(spec, rank=4))
    ranks = adapters.step(np.zeros(3, np.int64), np.zeros(1, np.int64)).places[0, :, :, RANK]
    assert (ranks > 0).tolist() == [[True, True, False, False], [True] * 4, [True, True, False, False]]
    CpuAdapters(KINDS["experts"], 1, 8).set_adapter(0, random_adapter(KINDS["experts"], rank=4))


def test_choosing() -> None:
    rng = np.random.default_rng(0)
    scores, bias = rng.standard_normal(40).astype(np.float32), rng.standard_normal(40).astype(np.float32)
    chosen, shares = np.zeros(6, np.int64), np.zeros(7, np.float32)
    for normed in (0, 1):
        choose(scores.copy(), bias, 40, 6, normed, chosen, shares)
        expected, best = torch.from_numpy(scores + bias).softmax(0).topk(6)
        assert chosen.tolist() == best.tolist()
        np.testing.assert_allclose(shares[:6], expected / expected.sum() if normed else expected, rtol=1e-5)


def test_scores_that_are_no_numbers_choose_existing_experts() -> None:
    chosen, shares = np.full(3, -1, np.int64), np.zeros(4, np.float32)
    choose(np.full(5, np.nan, np.float32), np.zeros(0, np.float32), 5, 3, 1, chosen, shares)
    assert ((chosen >= 0) & (chosen < 5)).all()


def test_rows_are_sorted_by_expert() -> None:
    chosen = np.array([[3, 0], [1, 3], [3, 1], [9, 9]])
    starts, tokens, rows = np.zeros(6, np.int64), np.zeros(8, np.int64), np.zeros((4, 2), np.int64)
    sort_rows(chosen, 3, starts, tokens, rows)  # of the first three tokens
    assert starts.tolist() == [0, 1, 3, 3, 6, 6]
    assert tokens[:6].tolist() == [0, 1, 2, 0, 1, 2]
    assert rows[:3].tolist() == [[3, 0], [1, 4], [5, 2]]


class _Counted(list[Stored]):
    """A sequence that counts how often it is read."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.reads += 1
        return super().__getitem__(place)


def test_matrices_are_laid_out_one_by_one() -> None:
    short = Stored((np.arange(64 * 64).reshape(64, 64) % 100).astype(np.uint16))
    made = _Counted([short, short, Stored(short.floats()), short])
    packed = layout(made, gated=False, dots=False)
    assert packed.weights.dtype == np.float32 and made.reads <= 8
    for index in range(4):
        np.testing.assert_array_equal(packed.weights[index, 0].T, short.floats())


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ((experts(size=48),), "multiples of 32"),
        ((experts(), experts(num_experts=5)), "different sizes"),
        ((PLAIN, experts(shared_size=64)), "different sizes"),
        ((experts(activation="gelu"),), "activation 'gelu'"),
    ],
)
def test_what_has_no_kernels_is_said(layers: tuple[LayerSpec, ...], reason: str) -> None:
    assert reason in (why_not(spec_of(*layers)) or "")
