"""Parts of a model: every number of it is held, those that are summed once, and what cannot be divided is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tonle.errors import ConfigError, ModelError
from tonle.models.layers import Quantized
from tonle.models.parallel.shard import Shard, check_size
from tonle.models.spec import AttentionSpec, LayerSpec, MixerSpec, ModelSpec, RopeSpec
from tonle.models.weights import LM_HEAD, tensor_shapes

ATTENTION = AttentionSpec(
    num_heads=8, num_kv_heads=4, head_dim=4, rope=RopeSpec(), sinks=True, qk_norm=True, qk_norm_whole=True, qkv_bias=True,
    o_bias=True,
)  # fmt: skip
GATED = MixerSpec(size=48, bias=True)
EXPERTS = MixerSpec(
    kind="experts",
    size=12,
    num_experts=8,
    experts_per_token=2,
    shared_size=16,
    shared_gate=True,
    router_bias=True,
    bias=True,
)
SPEC = ModelSpec(
    architecture="LlamaForCausalLM", vocab_size=50, hidden_size=32, norm_eps=1e-5, max_positions=64,
    layers=(LayerSpec(attention=ATTENTION, mixer=GATED), LayerSpec(attention=ATTENTION, mixer=EXPERTS)),
)  # fmt: skip


def with_kv_heads(count: int) -> ModelSpec:
    layers = tuple(replace(layer, attention=replace(layer.attention, num_kv_heads=count)) for layer in SPEC.layers)
    return replace(SPEC, layers=layers)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_tensors_have_the_shapes_of_the_part(size: int) -> None:
    whole = tensor_shapes(SPEC)
    for rank in range(size):
        shard = Shard(rank, size)
        for name, shape in tensor_shapes(shard.spec(SPEC)).items():
            if name == LM_HEAD:
                continue  # whose part the spec does not tell
            part = shard.weight(SPEC, name, torch.zeros(whole[name]))
            assert part.shape == shape, name


@pytest.mark.parametrize("size", [2, 4])
def test_every_number_is_held_once_or_by_all(size: int) -> None:
    shards = [Shard(rank, size) for rank in range(size)]
    names = [set(tensor_shapes(shard.spec(SPEC))) for shard in shards]
    for name, shape in tensor_shapes(SPEC).items():
        numbers = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
        parts = [shard.weight(SPEC, name, numbers) for shard, own in zip(shards, names, strict=True) if name in own]
        if ".experts." in name:
            assert len(parts) == 1 and torch.equal(parts[0], numbers), name
            continue
        cut = shards[0].cut(SPEC, name)
        if cut is None:
            assert all(torch.equal(part, numbers) for part in parts), name
        elif cut.along == "outputs":
            assert torch.equal(torch.cat(parts), numbers), name
        elif name.endswith(".bias"):
            assert torch.equal(sum(parts), numbers), name
        else:
            assert torch.equal(torch.cat(parts, dim=1), numbers), name


def test_ranks_that_share_a_key_value_head_have_the_same_one() -> None:
    spec = with_kv_heads(2)
    name = "model.layers.0.self_attn.k_proj.weight"
    numbers = torch.arange(8 * 32).view(8, 32)
    parts = [Shard(rank, 8).weight(spec, name, numbers) for rank in range(8)]
    assert all(part.shape == (4, 32) for part in parts)
    assert all(torch.equal(part, numbers[:4]) for part in parts[:4])
    assert all(torch.equal(part, numbers[4:]) for part in parts[4:])


def test_the_last_rank_may_have_less_of_the_vocabulary() -> None:
    assert [Shard(rank, 4).vocabulary(SPEC) for rank in range(4)] == [
        slice(0, 13), slice(13, 26), slice(26, 39), slice(39, 50),
    ]  # fmt: skip
    few = replace(SPEC, vocab_size=5)
    assert [Shard(rank, 4).vocabulary(few) for rank in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 5)]


def test_groups_of_inputs_are_cut_where_they_end() -> None:
    weight = Quantized(torch.randint(0, 16, (6, 64), dtype=torch.uint8), torch.rand(6, 4), torch.rand(6, 4))
    whole = weight.unpacked(torch.float32)
    for part in (slice(0, 32), slice(48, 64)):
        assert torch.equal(weight.columns(part).unpacked(torch.float32), whole[:, part])
    one_scale = Quantized(weight.numbers, torch.rand(6, 1))
    whole = one_scale.unpacked(torch.float32)
    assert torch.equal(one_scale.columns(slice(8, 24)).unpacked(torch.float32), whole[:, 8:24])
    with pytest.raises(ValueError, match="16 of its inputs share a scale"):
        weight.columns(slice(0, 24))


def test_a_quantized_matrix_whose_groups_would_be_cut_is_refused() -> None:
    weight = Quantized(torch.zeros(32, 48, dtype=torch.uint8), torch.rand(32, 2))
    with pytest.raises(
        ModelError, match=r"down_proj.weight cannot be divided between 4 ranks: 24 .*--quantization none"
    ):
        Shard(1, 4).weight(SPEC, "model.layers.0.mlp.down_proj.weight", weight)


@pytest.mark.parametrize(
    ("spec", "size", "why"),
    [
        (SPEC, 3, "its 8 attention heads are no multiple of 3. .* can be 1, 2, 4, 8"),
        (with_kv_heads(8), 16, "its 8 attention heads are no multiple of 16"),
        (replace(SPEC, layers=(LayerSpec(attention=replace(ATTENTION, num_heads=12, num_kv_heads=4), mixer=GATED),)), 6,
         "its 4 key-value heads are neither a multiple nor a divisor of 6. .* can be 1, 2, 4, 12"),
        (replace(SPEC, layers=(replace(SPEC.layers[0], mixer=replace(GATED, size=50)),)), 4, "perceptrons, 50, is no multiple"),
        (replace(SPEC, layers=(replace(SPEC.layers[1], mixer=replace(EXPERTS, num_experts=6)),)), 4, "its 6 experts"),
        (replace(SPEC, layers=(replace(SPEC.layers[1], mixer=replace(EXPERTS, shared_size=18)),)), 4, "shared expert, 18"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(spec: ModelSpec, size: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_size(spec, size)
    check_size(spec, 1)
