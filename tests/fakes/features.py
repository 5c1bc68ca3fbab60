"""Models that each have one feature which a forward pass can get wrong, and the same models without it: their mutants.

A forward pass that ignores a feature computes what the mutant computes. So a test sees a feature if the mutant's text and
log-probabilities differ from the model's own by more than the test allows; `tests/parity/test_mutants.py` holds that.
Does: make transformers models. Does not: know our code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fakes.checkpoints import tiny_model

Mutate = Callable[[Any], Any]  # from a transformers model to another

ORIGINAL_CONTEXT = 32  # tokens, of the models whose rope is scaled: prompts reach beyond it
WINDOW = 27
_THETA = 10_000.0


@dataclass(frozen=True)
class Feature:
    """A model of `family` that has the feature, and what would be wrong without it: names of `MUTANTS`."""

    family: str
    overrides: dict[str, Any]
    mutants: tuple[str, ...]

    def model(self, **more: Any) -> Any:
        """In float32. `more` are fields of the config, such as other sizes."""
        return tiny_model(self.family, **{**self.overrides, **more})


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": _THETA, "factor": 4.0, **more}}


def _rope_on(part: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": _THETA, "partial_rotary_factor": part}


FEATURES: dict[str, Feature] = {
    "llama3": Feature(
        "llama",
        _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL_CONTEXT),
        ("no attention", "rope scaling ignored", "last mixer skipped"),
    ),
    "yarn": Feature(
        "llama", _rope("yarn", original_max_position_embeddings=ORIGINAL_CONTEXT), ("no attention", "rope scaling ignored")
    ),
    "linear": Feature("llama", _rope("linear"), ("no attention", "rope scaling ignored")),
    "window": Feature("mistral", {"sliding_window": WINDOW}, ("no attention", "window ignored", "norm gains ignored")),
    "windows": Feature(  # the first layer sees everything
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "tie_word_embeddings": False},
        ("no attention", "window ignored", "qkv biases ignored"),
    ),
    "biases": Feature("qwen2", {}, ("no attention", "qkv biases ignored", "norm gains ignored", "last mixer skipped")),
    "head-norms": Feature(
        "qwen3", {}, ("no attention", "q/k norm ignored", "q/k norm gains ignored", "last mixer skipped")
    ),
    "whole-norms": Feature("olmo2", {}, ("q/k norm gains ignored", "norm gains after ignored", "last mixer skipped")),
    "rotated-part": Feature("phi3", {"rope_parameters": _rope_on(0.5)}, ("all of a head rotated",)),
    "rotated-pairs": Feature("glm4", {}, ("all of a head rotated", "halves rotated", "norm gains after ignored")),
    "no-rope": Feature("smollm3", {}, ("every layer rotated",)),
    "two-ropes": Feature(
        "gemma3",
        {"sliding_window": WINDOW},
        ("one rope", "windows wide", "gain offset ignored", "score scale ignored"),
    ),
    "soft-caps": Feature("gemma2", {}, ("score cap ignored", "logit cap ignored")),
    "multipliers": Feature(
        "granite",
        {},
        ("embedding scale ignored", "residual scale ignored", "logit scale ignored", "score scale ignored"),
    ),
}  # fmt: skip


@torch.no_grad()
def rounded(model: Any, dtype: torch.dtype, *, keep: bool = False) -> Any:
    """A copy in `dtype`; `keep`: in float32, with the values that `dtype` holds. Rotation angles stay as they are."""
    made = copy.deepcopy(model)
    for tensor in made.parameters():
        tensor.data = tensor.data.to(dtype).float() if keep else tensor.data.to(dtype)
    return made


def _with_values(value: float, *parts: str) -> Mutate:
    """All tensors whose names have one of `parts` in them are set to `value`."""

    @torch.no_grad()
    def change(model: Any) -> Any:
        model = copy.deepcopy(model)
        chosen = [tensor for name, tensor in model.named_parameters() if any(part in name for part in parts)]
        assert chosen, f"the model has no tensor {' or '.join(parts)}"
        for tensor in chosen:
            tensor.fill_(value)
        return model

    return change


def _with_config(**changes: Any) -> Mutate:
    def change(model: Any) -> Any:
        config = copy.deepcopy(model.config)
        for name, value in changes.items():
            setattr(config, name, copy.deepcopy(value))
        if getattr(config, "layer_types", None) and "sliding_window" in changes and "layer_types" not in changes:
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        changed = type(model)(config).eval()
        changed.load_state_dict(model.state_dict())
        return changed.requires_grad_(False)

    return change


def _without_head_norms(model: Any) -> Any:
    """A qwen3 without them is a llama."""
    own = model.config.to_dict()
    kept = {
        name: own[name]
        for name in LlamaConfig().to_dict()
        if name in own and name not in ("model_type", "architectures")
    }
    changed = LlamaForCausalLM(LlamaConfig(**kept)).eval()
    rest = changed.load_state_dict(model.state_dict(), strict=False)
    assert not rest.missing_keys and all("_norm" in name for name in rest.unexpected_keys)
    return changed.requires_grad_(False)


def _without_last_mixer(model: Any) -> Any:
    return _with_values(0.0, f"layers.{model.config.num_hidden_layers - 1}.mlp.down_proj")(model)


def _with_every_layer_rotated(model: Any) -> Any:
    return _with_config(no_rope_layers=[1] * model.config.num_hidden_layers)(model)


def _with_wide_windows(model: Any) -> Any:
    """In models whose layers of both types have ropes of their own, types must stay."""
    types = list(model.config.layer_types)
    return _with_config(sliding_window=model.config.max_position_embeddings, layer_types=types)(model)


def _without_score_scale(model: Any) -> Any:
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    if hasattr(model.config, "query_pre_attn_scalar"):
        return _with_config(query_pre_attn_scalar=head_dim)(model)
    return _with_config(attention_multiplier=head_dim**-0.5)(model)


@torch.no_grad()
def _with_larger_gains(model: Any) -> Any:
    """By one: what a model computes that adds to its gains what they have already."""
    changed = copy.deepcopy(model)
    for name, tensor in changed.named_parameters():
        if name.endswith("norm.weight"):
            tensor += 1
    return changed


@torch.no_grad()
def _with_halves(model: Any) -> Any:
    """Turning rows i and i + half of a head, as stored, is turning neighbours after this change of order."""
    changed = copy.deepcopy(model)
    head_dim = model.config.head_dim
    rotated = int(head_dim * model.config.rope_parameters["partial_rotary_factor"])
    for name, tensor in changed.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            heads = tensor.view(-1, head_dim, *tensor.shape[1:])
            halves = heads[:, :rotated].clone().unflatten(1, (2, rotated // 2)).transpose(1, 2).flatten(1, 2)
            heads[:, :rotated] = halves
    return changed


MUTANTS: dict[str, Mutate] = {
    "no attention": _with_values(0.0, "o_proj.weight"),
    "window ignored": _with_config(sliding_window=None, use_sliding_window=False),
    "q/k norm ignored": _without_head_norms,
    "q/k norm gains ignored": _with_values(1.0, "q_norm.weight", "k_norm.weight"),
    "norm gains ignored": _with_values(1.0, "layernorm.weight"),
    "rope scaling ignored": _with_config(rope_parameters={"rope_type": "default", "rope_theta": _THETA}),
    "qkv biases ignored": _with_values(0.0, "proj.bias"),
    "last mixer skipped": _without_last_mixer,
    "norm gains after ignored": _with_values(1.0, "post_feedforward_layernorm", "post_mlp_layernorm"),
    "all of a head rotated": _with_config(rope_parameters=_rope_on(1.0)),
    "halves rotated": _with_halves,
    "every layer rotated": _with_every_layer_rotated,
    "one rope": _with_config(rope_parameters=dict.fromkeys(("sliding_attention", "full_attention"), _rope_on(1.0))),
    "windows wide": _with_wide_windows,
    "gain offset ignored": _with_larger_gains,
    "score scale ignored": _without_score_scale,
    "score cap ignored": _with_config(attn_logit_softcapping=None),
    "logit cap ignored": _with_config(final_logit_softcapping=None),
    "embedding scale ignored": _with_config(embedding_multiplier=1.0),
    "residual scale ignored": _with_config(residual_multiplier=1.0),
    "logit scale ignored": _with_config(logits_scaling=1.0),
}
