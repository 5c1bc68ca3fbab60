"""All tokens of a step in one call of a `transformers` model, which has our attention for its own.

Does: the function that models call for attention (their attention interface), over the paged cache; learn from one call what
each layer asks of it. Does not: work for models that compute attention themselves (`transformers_padded.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from tonle.errors import ModelError
from tonle.models.attention import StepAttention, TorchAttention
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.spec import AttentionSpec, ModelSpec
from tonle.models.transformers_call import ModelCall

_NAME = "tonle"  # of our function, among those that models can be told to call

# module, query (1, heads, T, dim), key and value (1, kv heads, T, dim), the other arguments -> (1, T, heads, value dim)
_Attend = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]
_attend: ContextVar[_Attend] = ContextVar("tonle_attend")  # of the call under way


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **others: Any
) -> tuple[torch.Tensor, None]:
    return _attend.get()(module, query, key, value, others), None


AttentionInterface.register(_NAME, _attention)


class NotCausalError(ModelError):
    """The model is no decoder, in whatever way it runs."""


@dataclass(frozen=True, slots=True, eq=False)
class SeenLayer:
    """What one layer asks of attention."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float | None
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None  # (heads,)


class FlatForward:
    """Runs steps. `layers`: as seen by `look`; `spec`: made from them by `described`."""

    def __init__(self, call: ModelCall, spec: ModelSpec, layers: list[SeenLayer]) -> None:
        self._call = call
        self._layers = layers
        self._head_dim = spec.head_dim
        self._attention = TorchAttention(spec, [layer.sinks for layer in layers])

    def run(self, inputs: StepInputs, kv: KVCache, states: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (S, vocab) float32. `states` (P, hidden): filled with hidden states of `inputs.hidden_indices`."""
        step = _Step(len(self._layers), self._head_dim, kv.k.dtype, self._attention.prepare(inputs, kv))
        arguments = {"position_ids": inputs.positions[None], "use_cache": False}
        with _calling(self._call, step):
            logits, hidden = self._call(inputs.tokens[None], inputs.logit_indices, states is not None, arguments)
        step.check_complete()
        if states is not None:
            assert hidden is not None and inputs.hidden_indices is not None
            states.copy_(hidden[0].index_select(0, inputs.hidden_indices))
        return logits[0].float()


class _Step:
    """Layers call in their order, each once."""

    def __init__(self, num_layers: int, head_dim: int, dtype: torch.dtype, attend: StepAttention) -> None:
        self._num_layers = num_layers
        self._head_dim = head_dim
        self._dtype = dtype
        self._attend = attend
        self._next = 0

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, others: dict[str, Any]
    ) -> torch.Tensor:
        index, self._next = self._next, self._next + 1
        value_dim = value.shape[-1]
        attended = self._attend(index, self._rows(query), self._rows(key), self._rows(value))
        return attended[..., :value_dim].contiguous()[None].to(value.dtype)

    def _rows(self, heads: torch.Tensor) -> torch.Tensor:
        """(1, heads, T, dim) -> (T, heads, head_dim): the cache has one size for keys and values of all layers."""
        rows = heads[0].transpose(0, 1).to(self._dtype)
        missing = self._head_dim - rows.shape[-1]
        return pad(rows, (0, missing)) if missing else rows

    def check_complete(self) -> None:
        assert self._next == self._num_layers, f"{self._next} layers of {self._num_layers} called attention"


@contextlib.contextmanager
def _calling(call: ModelCall, attend: _Attend) -> Iterator[None]:
    """The model calls `attend` here, and elsewhere what it called before: its owner may use it between steps."""
    token = _attend.set(attend)
    try:
        with call.attention(_NAME):
            yield
    finally:
        _attend.reset(token)


def look(call: ModelCall) -> list[SeenLayer]:
    """The layers of a model, from one call with one token. Raises `ModelError` if it cannot be run in this way."""
    if not call.takes("position_ids"):
        raise ModelError("it takes no position_ids")
    seen: list[SeenLayer] = []

    def watch(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, others: dict[str, Any]) -> Any:
        seen.append(_seen(module, query, key, value, others))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    device = call.device
    with _calling(call, watch):
        call(
            torch.zeros((1, 1), dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device),
            False, {"position_ids": torch.zeros((1, 1), dtype=torch.int64, device=device), "use_cache": False},
        )  # fmt: skip
    if not seen:
        raise ModelError("none of its layers calls the attention interface")
    _check_kinds(call.layer_types, seen)
    return seen


def _seen(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, others: dict[str, Any]
) -> SeenLayer:
    if not getattr(module, "is_causal", True):
        raise NotCausalError(f"attention of its {type(module).__name__} is not causal: tokens see later ones")
    scale = others.get("scaling")
    return SeenLayer(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_dim=key.shape[-1],
        value_dim=value.shape[-1],
        scale=None if scale is None else float(scale),
        window=others.get("sliding_window"),
        soft_cap=others.get("softcap"),
        sinks=others.get("s_aux"),
    )


def _check_kinds(layer_types: list[str], seen: list[SeenLayer]) -> None:
    """Where the config names the kinds of layers, attention must have been told the same."""
    if other := sorted(set(layer_types) - {"full_attention", "sliding_attention"}):
        raise ModelError(f"attention of its layers of kind {other[0]} is of another form")
    if layer_types and len(layer_types) == len(seen):
        for index, (kind, layer) in enumerate(zip(layer_types, seen, strict=True)):
            if (kind == "sliding_attention") != (layer.window is not None):
                raise ModelError(f"layer {index} is of kind {kind}, but its attention gets the window {layer.window}")


def described(layers: list[SeenLayer]) -> list[AttentionSpec]:
    """As our attention needs them; the cache has room for the widest keys or values."""
    head_dim = max(max(layer.key_dim, layer.value_dim) for layer in layers)
    return [
        AttentionSpec(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=head_dim,
            rope=None,  # the model rotates by itself
            window=layer.window,
            scale=layer.key_dim**-0.5 if layer.scale is None else layer.scale,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks is not None,
        )
        for layer in layers
    ]
