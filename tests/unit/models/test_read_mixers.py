"""Mixers from configs: which layers have experts, what kind of, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tonle.errors import ModelError
from tonle.models.load.places import places, stored_shapes
from tonle.models.read_spec import from_hf_config
from tonle.models.spec import MixerSpec

_SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "num_experts_per_tok": 2, "intermediate_size": 320,
}  # fmt: skip
MIXTRAL = {**_SIZES, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
QWEN2 = {**_SIZES, "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 16, "moe_intermediate_size": 64,
         "shared_expert_intermediate_size": 128}  # fmt: skip
QWEN3 = {**_SIZES, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "moe_intermediate_size": 64}
OLMOE = {**_SIZES, "architectures": ["OlmoeForCausalLM"], "num_experts": 16}
GPT_OSS = {**_SIZES, "architectures": ["GptOssForCausalLM"], "num_local_experts": 16}


def test_experts_in_numbers() -> None:
    for config, expected in {
        "mixtral": (MIXTRAL, MixerSpec(kind="experts", size=320, num_experts=8, experts_per_token=2)),
        "qwen2": (QWEN2, MixerSpec(kind="experts", size=64, num_experts=16, experts_per_token=2, normed_shares=False,
                                   shared_size=128, shared_gate=True)),
        "qwen3": (QWEN3, MixerSpec(kind="experts", size=64, num_experts=16, experts_per_token=2, normed_shares=False)),
        "gpt-oss": (GPT_OSS, MixerSpec(kind="experts", size=320, num_experts=16, experts_per_token=2, bias=True, clamp=7.0,
                                       router_bias=True, activation="swigluoai")),
    }.values():  # fmt: skip
        spec = from_hf_config(config)
        assert [layer.mixer for layer in spec.layers] == [expected] * 4
    assert from_hf_config({**QWEN3, "norm_topk_prob": True}).layers[0].mixer.normed_shares


def test_attention_of_families_with_experts() -> None:
    oss = from_hf_config(GPT_OSS)
    assert oss.windows == (128, None, 128, None) and oss.head_dim == 64
    assert all(layer.attention.sinks and layer.attention.o_bias for layer in oss.layers)
    assert from_hf_config(QWEN2).layers[0].attention.qkv_bias
    assert not from_hf_config({**QWEN2, "qkv_bias": False}).layers[0].attention.qkv_bias
    assert from_hf_config(OLMOE).layers[0].attention.qk_norm_whole
    assert from_hf_config(MIXTRAL).windows == (None,) * 4
    assert from_hf_config({**MIXTRAL, "sliding_window": 64}).windows == (64,) * 4


def test_windows_count_only_where_they_are_used() -> None:
    for config in (QWEN2, QWEN3):
        assert from_hf_config({**config, "sliding_window": 64}).windows == (None,) * 4
    assert from_hf_config({**QWEN3, "sliding_window": 64, "use_sliding_window": True}).windows == (64,) * 4
    used = {**QWEN2, "sliding_window": 64, "use_sliding_window": True}
    assert from_hf_config(used).windows == (64, None, 64, None)


def test_layers_without_experts() -> None:
    def kinds(**change: Any) -> list[str]:
        return [f"{m.kind} {m.size}" for m in (layer.mixer for layer in from_hf_config({**QWEN3, **change}).layers)]

    assert kinds(mlp_only_layers=[0, 3]) == ["gated 320", "experts 64", "experts 64", "gated 320"]
    assert kinds(decoder_sparse_step=2) == ["gated 320", "experts 64", "gated 320", "experts 64"]
    assert kinds(num_experts=0) == ["gated 320"] * 4


@pytest.mark.parametrize(("config", "complaint"), [
    ({**OLMOE, "clip_qkv": 8.0}, "clip_qkv"),
    ({**GPT_OSS, "swiglu_alpha": 2.0}, r"swiglu_alpha 2.0 is not supported; supported: 1.702"),
    ({**GPT_OSS, "swiglu_limit": None}, "positive number as swiglu_limit, not None"),
    ({**MIXTRAL, "num_experts_per_tok": 9}, "cannot have 9 of 8 experts"),
    ({**QWEN3, "num_experts": "many"}, "whole number as num_experts, not 'many'"),
    ({**QWEN2, "shared_expert_intermediate_size": None}, "whole number as shared_expert_intermediate_size"),
    ({**QWEN3, "hidden_act": "tanh"}, "activation 'tanh'"),
])  # fmt: skip
def test_refusals(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        from_hf_config(config)


def test_where_checkpoints_have_the_tensors_of_experts() -> None:
    spec, first = from_hf_config(MIXTRAL), "model.layers.0."
    where = places(spec, ["model.layers.0.block_sparse_moe.experts.0.w1.weight"])
    assert where[f"{first}mlp.experts.5.up_proj.weight"].stored == f"{first}block_sparse_moe.experts.5.w3.weight"
    assert where[f"{first}mlp.gate.weight"].stored == f"{first}block_sparse_moe.gate.weight"
    fused = [f"model.layers.{i}.mlp.{name}" for i in range(4) for name in (
        "gate.weight", "experts.gate_up_proj", "experts.down_proj")]  # fmt: skip
    where = places(spec, fused)
    shapes = stored_shapes(spec, where)
    assert shapes[f"{first}mlp.experts.gate_up_proj"] == (8, 640, 256)
    assert shapes[f"{first}mlp.experts.down_proj"] == (8, 256, 320)
    assert where[f"{first}mlp.gate.weight"].stored == f"{first}mlp.gate.weight"
    place = where[f"{first}mlp.experts.5.up_proj.weight"]
    assert (place.expert, place.rows) == (5, slice(320, 640))


def test_where_gpt_oss_has_the_tensors_of_experts() -> None:
    spec, first = from_hf_config(GPT_OSS), "model.layers.0.mlp."
    names = [f"model.layers.{i}.mlp.experts.{name}" for i in range(4) for name in (
        "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")]  # fmt: skip
    shapes = stored_shapes(spec, places(spec, names))
    assert shapes[f"{first}experts.gate_up_proj"] == (16, 256, 640)
    assert shapes[f"{first}experts.gate_up_proj_bias"] == (16, 640)
    assert shapes[f"{first}experts.down_proj"] == (16, 320, 256)
    assert shapes[f"{first}router.bias"] == (16,)
    packed = [f"{name}_blocks" if name.endswith("_proj") else name for name in names]
    where = places(spec, packed)
    assert stored_shapes(spec, where)[f"{first}experts.gate_up_proj_blocks"] == (16, 640, 256)
    assert not where[f"{first}experts.0.up_proj.weight"].transposed
    assert where[f"{first}experts.0.up_proj.weight"].rows == slice(1, None, 2)
