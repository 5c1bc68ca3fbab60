"""`gguf_places`: where a GGUF file has each tensor of a model, by our names.

Does: GGUF's own names. Does not: read files; see `places.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from tonle.models.families import family
from tonle.models.load.places import Place, arrange
from tonle.models.spec import LayerSpec, ModelSpec
from tonle.models.weights import EMBEDDING, FINAL_NORM, LM_HEAD, norm_names

_TOP_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}
_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",  # twice as high as without a gate in it
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
_ALL_EXPERTS = "_exps"
_TENSOR_OF_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\..+")


def gguf_places(spec: ModelSpec, found: Collection[str]) -> dict[str, Place]:
    """`found`: the names of the file's tensors."""
    modules = {name.rpartition(".")[0] for name in found}
    in_pairs = family(spec.architecture).gguf_interleaved

    def stored_module(index: int, module: str) -> str:
        expert = _EXPERT.fullmatch(module)
        if expert and (alone := f"blk.{index}.ffn_{expert[2]}.{expert[1]}") in modules:  # files of before April 2024
            return alone
        stored = f"blk.{index}.{_module(spec.layers[index], module)}"
        after = f"blk.{index}.post_attention_norm"  # what gpt-oss calls the norm before its mixers
        before_mixer = stored == f"blk.{index}.ffn_norm" and stored not in modules and after in modules
        return after if before_mixer else stored

    made = arrange(spec, stored_module, modules, in_pairs)
    for name, stored in _TOP_NAMES.items():
        if name in made:
            made[name] = replace(made[name], stored=stored)
    for index, layer in enumerate(spec.layers):
        if layer.attention.sinks:
            made[f"model.layers.{index}.self_attn.sinks"] = Place(f"blk.{index}.attn_sinks.weight")
    return {name: _in_all_experts(name, place) for name, place in made.items()}


def _in_all_experts(name: str, place: Place) -> Place:
    match = _TENSOR_OF_EXPERT.fullmatch(name)
    if match is None or _ALL_EXPERTS not in place.stored:
        return place
    return replace(place, expert=int(match[1]))


def _module(layer: LayerSpec, module: str) -> str:
    if module in _MODULES:
        return _MODULES[module]
    if match := _EXPERT.fullmatch(module):  # one tensor holds those of all experts
        return f"ffn_{match[2]}{_ALL_EXPERTS}"
    names = norm_names(layer)  # the same name stands for another norm where a layer has more of them
    norms = {
        names.before_mixer: "ffn_norm",
        names.after_mixer: "post_ffw_norm",
        names.after_attention: "post_attention_norm",
        names.before_attention: "attn_norm",
    }
    return norms[module]
