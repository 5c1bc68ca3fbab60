"""`TransformersDecoder`: any decoder that `transformers` can run, in steps over our paged cache.

Does: let the model compute everything but attention, or attention as well where it cannot be replaced; refuse, with the
reason, what would come out wrong. Does not: run fast (no kernels of ours, no graphs), or take adapters: families in
`families.py` do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from tonle.errors import ModelError
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.outline import outline
from tonle.models.spec import AttentionSpec, LayerSpec, ModelSpec
from tonle.models.transformers_call import ModelCall
from tonle.models.transformers_check import check
from tonle.models.transformers_flat import FlatForward, NotCausalError, described, look
from tonle.models.transformers_padded import PaddedForward, kept_shape

log = logging.getLogger("tonle.models")

_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}  # of layers that keep keys and values alone


class Forward(Protocol):
    """How a step is computed."""

    def run(self, inputs: StepInputs, kv: KVCache, states: torch.Tensor | None = None) -> torch.Tensor: ...


class TransformersDecoder:
    """A live model of `transformers` and the way in which steps run through it."""

    def __init__(self, model: Any, spec: ModelSpec, forward: Forward) -> None:
        self.spec = spec
        self._model = model
        self._forward = forward

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    def forward(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        """Logits (S, vocab) float32 of the tokens `inputs.logit_indices` names."""
        return self._forward.run(inputs, kv)

    def forward_hidden(self, inputs: StepInputs, kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, and hidden states (P, hidden) float32, after the last norm, of tokens `inputs.hidden_indices` names."""
        assert inputs.hidden_indices is not None
        states = torch.empty(len(inputs.hidden_indices), self.spec.hidden_size, device=self.device)
        return self._forward.run(inputs, kv, states), states

    def set_adapter(self, slot: int, adapter: object) -> None:
        raise AssertionError("takes no adapters: it has no enable_adapters")


@torch.inference_mode()
def adopt(model: Any) -> TransformersDecoder:
    """A decoder around a live model, which it shares. Raises `ModelError` with the reason if it cannot be run."""
    call = ModelCall(model)
    name = type(model).__name__
    _refuse(call, name)
    config = {**call.text_config.to_dict(), "architectures": [name], "dtype": str(model.dtype)}
    generation = getattr(model, "generation_config", None)
    spec = _sized(outline(config, None if generation is None else generation.to_dict()), call)
    ways: dict[str, Callable[[], TransformersDecoder]] = {
        "in one call for each step": lambda: _flat(call, spec),
        "in a padded batch": lambda: _padded(call, spec),
    }
    reasons = []
    for way, make in ways.items():
        try:
            decoder = make()
            check(decoder, call)
        except NotCausalError as error:
            raise ModelError(f"{name} cannot be served: {error.message}") from None
        except Exception as error:  # of the model's own code: anything
            reason = error.message if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
            reasons.append(f"{way}: {reason}")
            continue
        log.info("%s runs through transformers, %s: on torch operations, without kernels of ours", name, way)
        return decoder
    raise ModelError(f"{name} cannot be served, not even through transformers ({'; '.join(reasons)})")


def _refuse(call: ModelCall, name: str) -> None:
    model = call.model
    if model.training:
        raise ModelError(f"the live {name} is in training mode; call model.eval() first")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{name} has an encoder; only decoders are supported")
    if other := sorted(set(call.layer_types) - _KINDS):
        raise ModelError(f"{name} has layers of kind {other[0]}, which keep a state other than keys and values")
    if getattr(model, "_is_stateful", False):
        raise ModelError(f"{name} keeps a state other than keys and values")


def _sized(spec: ModelSpec, call: ModelCall) -> ModelSpec:
    """With the sizes of what it truly gives."""
    one = torch.zeros((1, 1), dtype=torch.int64, device=call.device)
    logits, hidden = call(one, one[0], True, {"use_cache": False})
    if hidden is None:
        raise ModelError(f"the hidden states of {type(call.model).__name__} cannot be read")
    return replace(spec, vocab_size=logits.shape[-1], hidden_size=hidden.shape[-1])


def _flat(call: ModelCall, spec: ModelSpec) -> TransformersDecoder:
    layers = look(call)
    spec = replace(spec, layers=_layers(spec, described(layers)))
    return TransformersDecoder(call.model, spec, FlatForward(call, spec, layers))


def _padded(call: ModelCall, spec: ModelSpec) -> TransformersDecoder:
    num_layers, num_heads, head_dim = kept_shape(call)
    attention = AttentionSpec(num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, rope=None)
    spec = replace(spec, layers=_layers(spec, [attention] * num_layers))
    return TransformersDecoder(call.model, spec, PaddedForward(call))


def _layers(spec: ModelSpec, attentions: list[AttentionSpec]) -> tuple[LayerSpec, ...]:
    mixer = spec.layers[0].mixer
    return tuple(LayerSpec(attention=attention, mixer=mixer) for attention in attentions)
