"""Every difference between layers that the compiled step supports, against torch on the same random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fakes.cpu_models import RandomModel, plain_layer, spec_of, step_of
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.pack import support, why_not
from tonle.models.cpu.team import Team
from tonle.models.decoder import Decoder
from tonle.models.layer_order import Piece, layer_order
from tonle.models.spec import LayerSpec, ModelSpec, RopeSpec

PLAIN = plain_layer()


def other(layer: LayerSpec = PLAIN, *, mixer: dict[str, Any] | None = None, **attention: Any) -> LayerSpec:
    return replace(layer, attention=replace(layer.attention, **attention), mixer=replace(layer.mixer, **(mixer or {})))


KINDS: dict[str, ModelSpec] = {
    "a rope per layer": spec_of(PLAIN, other(rope=RopeSpec(theta=300.0)), other(rope=RopeSpec(kind="linear", factor=4.0))),
    "a layer without rope": spec_of(other(rope=None), PLAIN),
    "no rope at all": spec_of(other(rope=None), other(rope=None)),
    "a scale of its own": spec_of(other(scale=0.6), PLAIN),
    "soft cap": spec_of(other(soft_cap=0.7), other(soft_cap=30.0, scale=4.0), PLAIN),
    "sinks": spec_of(other(sinks=True), PLAIN),
    "sinks and a window": spec_of(other(sinks=True, window=16), other(window=5)),
    "norms after": spec_of(replace(PLAIN, norm_after=True), PLAIN),
    "norms after alone": spec_of(*[replace(PLAIN, norm_after=True, norm_before=False)] * 2),
    "no norms": spec_of(PLAIN, replace(PLAIN, norm_before=False)),
    "parallel": spec_of(*[replace(PLAIN, residual="parallel")] * 2),
    "parallel last": spec_of(PLAIN, replace(PLAIN, residual="parallel")),
    "biases": spec_of(other(qkv_bias=True, o_bias=True, mixer={"bias": True}), PLAIN),
    "biases and norms after": spec_of(replace(other(o_bias=True, mixer={"bias": True}), norm_after=True), PLAIN),
    "head norms in one layer": spec_of(other(qk_norm=True), PLAIN),
    "part of each head rotated": spec_of(other(rope=RopeSpec(rotated=6)), PLAIN),
    "ropes of different parts": spec_of(other(rope=RopeSpec(rotated=6)), other(rope=RopeSpec(theta=99.0, rotated=10))),
    "norms over all heads": spec_of(other(qk_norm=True, qk_norm_whole=True), other(qk_norm=True)),
    "norms over all heads, biases": spec_of(other(qk_norm=True, qk_norm_whole=True, qkv_bias=True), PLAIN),
    "gelu": spec_of(other(mixer={"activation": "gelu_tanh"}), PLAIN),
    "squared relu": spec_of(other(mixer={"activation": "relu2"}), PLAIN),
    "gain offset": spec_of(replace(other(qk_norm=True), norm_after=True), PLAIN, gain_offset=1.0),
    "tied embeddings": spec_of(PLAIN, PLAIN, tie_embeddings=True),
    "scaled embeddings": spec_of(PLAIN, PLAIN, embedding_scale=7.0),
    "scaled additions": spec_of(other(o_bias=True, mixer={"bias": True}), PLAIN, residual_scale=0.22),
    "scaled logits": spec_of(PLAIN, PLAIN, logit_scale=0.125),
    "soft cap of logits": spec_of(PLAIN, PLAIN, logit_soft_cap=0.7),
}  # fmt: skip


def logits_of(decoder: Decoder | CpuDecoder, model: RandomModel) -> torch.Tensor:
    """Of chunks on top of cached tokens, a decoding row, and a prompt; only some tokens are wanted."""
    kv = model.cache()
    decoder.forward(step_of([(0, 11), (0, 30)]), kv)
    inputs = step_of([(11, 12), (30, 50), (0, 9)])
    inputs.logit_indices = torch.tensor([0, 7, 20, 25, 29])
    return decoder.forward(inputs, kv).clone()


@pytest.mark.parametrize("head_dim", [24, 80, 96, 256])
def test_heads_of_any_size(head_dim: int) -> None:
    """Whole vectors or not; those of 64 and 128 numbers, which have loops of their own, run in every test with a real model."""
    _assert_equals_torch(spec_of(plain_layer(head_dim=head_dim), plain_layer(head_dim=head_dim, window=5)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_step_equals_torch(kind: str) -> None:
    _assert_equals_torch(KINDS[kind])


@torch.inference_mode()
def _assert_equals_torch(spec: ModelSpec) -> None:
    assert why_not(spec) is None
    model = RandomModel(spec)
    expected, found = logits_of(model.torch(), model), logits_of(model.fast(team=Team(2)), model)
    assert float((found - expected).norm() / expected.norm()) < 1e-3
    assert float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().max()) < 2e-2


@torch.inference_mode()
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tied embeddings"])
def test_each_difference_is_seen(kind: str) -> None:
    """A model whose layers are described as plain ones gives something else: the comparison above can fail."""
    spec = KINDS[kind]
    model = RandomModel(spec)
    plain = replace(
        spec, gain_offset=0.0, embedding_scale=1.0, residual_scale=1.0, logit_scale=1.0, logit_soft_cap=None
    )
    if plain == spec:
        plain = replace(spec, layers=tuple(_plainer(layer, kind) for layer in spec.layers))
    expected = logits_of(model.torch(), model)
    model.spec = plain
    assert why_not(plain) is None
    difference = (logits_of(model.fast(), model) - expected).norm() / expected.norm()
    assert float(difference) > 1e-2


def _plainer(layer: LayerSpec, kind: str) -> LayerSpec:
    """Without what the kind is about; tensors are called the same."""
    if "norms after" in kind:
        return (
            replace(layer, norm_after=False)
            if "alone" not in kind
            else replace(layer, norm_after=False, norm_before=False)
        )
    if "parallel" in kind:
        return layer if layer is PLAIN else replace(layer, norm_before=False, residual="parallel")
    if "no norms" in kind:
        return replace(layer, norm_before=False)
    plain = replace(layer.attention, rope=RopeSpec(), scale=None, soft_cap=None, sinks=False, window=None, qkv_bias=False,
                    o_bias=False, qk_norm=False, qk_norm_whole=False)  # fmt: skip
    return replace(layer, attention=plain, mixer=replace(layer.mixer, bias=False, activation="silu"))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (other(mixer={"kind": "plain"}), "kind 'plain'"),
        (other(mixer={"activation": "gelu"}), "activation 'gelu'"),
    ],
)
def test_what_has_no_kernels_is_said(layer: LayerSpec, reason: str) -> None:
    answers = {piece: support(layer, piece) for piece in layer_order(layer)}
    assert {piece for piece, answer in answers.items() if answer.form == "none"} == {Piece.MIX, Piece.ADD_MIXED}
    assert reason in (why_not(spec_of(PLAIN, layer)) or "")


def test_layers_of_different_widths_run_through_torch() -> None:
    assert "different sizes" in (why_not(spec_of(PLAIN, other(mixer={"size": 64}))) or "")
