"""`Encoder`: the states of all tokens of a packed batch, for every family of spec.py.

Does: products over the tokens alone, attention in rectangles of inputs that are about as long. Each input's states are those it
has alone. Does not: pool or tokenize.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tonle.workers.encoders.packed import Group, Packed
from tonle.workers.encoders.spec import EncoderSpec
from tonle.workers.encoders.weights import EncoderWeights, Layer, Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
# Padding / tokens that attention may compute: on a GPU one launch more costs as much as some padding.
_MOST_PADDING = {"cpu": 0.15, "cuda": 0.5}


class _Rectangle:
    """Where the tokens of a group lie, and which of them see each other."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.span = slice(group.first, group.first + group.num_tokens)
        self.shape = (len(group.lengths), group.lengths[-1])  # inputs, tokens of the longest
        self._is_even = group.is_even
        if self._is_even:
            return
        lengths = torch.tensor(group.lengths, device=device)
        self._inside = torch.arange(self.shape[1], device=device) < lengths[:, None]  # (inputs, longest)
        starts = lengths.cumsum(0) - lengths
        self._places = torch.where(self._inside, starts[:, None] + torch.arange(self.shape[1], device=device), 0)

    def spread(self, tokens: Tensor) -> Tensor:
        """(tokens, …) of the group to (inputs, longest, …). What stands in the padding is not looked at."""
        return tokens.view(*self.shape, *tokens.shape[1:]) if self._is_even else tokens[self._places]

    def gather(self, states: Tensor) -> Tensor:
        """Back."""
        return states.flatten(0, 1) if self._is_even else states[self._inside]

    def mask(self, window: int | None) -> Tensor | None:
        """(inputs or 1, 1, 1 or longest, longest): True where a token is seen. None: all see all."""
        sees: Tensor | None = None if self._is_even else self._inside[:, None, None, :]
        if window is not None and self.shape[1] > window + 1:
            device = None if self._is_even else self._inside.device
            places = torch.arange(self.shape[1], device=device)
            near = ((places[:, None] - places).abs() <= window)[None, None]
            # A row of padding that sees nothing would be 0 / 0, so it sees its neighbours; nobody looks at it.
            sees = near if sees is None else torch.where(self._inside[:, None, :, None], near & sees, near)
        return sees


class Encoder:
    def __init__(self, spec: EncoderSpec, weights: EncoderWeights) -> None:
        self.spec = spec
        self.device = weights.words.device
        self._weights = weights
        self._act = ACTIVATIONS[spec.activation]

    @torch.inference_mode()
    def states(self, packed: Packed) -> Tensor:
        """(tokens, hidden)."""
        positions = torch.from_numpy(packed.positions).to(self.device)
        states = self._embed(packed, positions)
        padding = _MOST_PADDING.get(self.device.type, 0.5)
        rectangles = [_Rectangle(group, self.device) for group in packed.groups(padding)]
        masks: dict[int | None, list[Tensor | None]] = {}
        for window in set(self.spec.windows):
            found = [rectangle.mask(window) for rectangle in rectangles]
            masks[window] = [None if mask is None else mask.to(self.device) for mask in found]
        turns = {theta: self._turn(theta, positions, states.dtype) for theta in set(self.spec.rope_thetas)}
        for number, layer in enumerate(self._weights.layers):
            turn = turns[self.spec.rope_thetas[number]] if self.spec.rope_thetas else None
            states = self._layer(
                layer, states, list(zip(rectangles, masks[self.spec.windows[number]], strict=True)), turn
            )
        return states if self._weights.final_norm is None else self._norm(states, self._weights.final_norm)

    def _embed(self, packed: Packed, positions: Tensor) -> Tensor:
        weights = self._weights
        states = F.embedding(torch.from_numpy(packed.ids).to(self.device), weights.words)
        if weights.positions is not None:
            states = states + F.embedding(positions + self.spec.position_offset, weights.positions)
        if weights.types is not None:
            states = states + F.embedding(torch.from_numpy(packed.types).to(self.device).int(), weights.types)
        return self._norm(states, weights.norm)

    def _layer(
        self, layer: Layer, states: Tensor, groups: list[tuple[_Rectangle, Tensor | None]],
        turn: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        if self.spec.family.is_pre_norm:
            before = states if layer.attention_norm is None else self._norm(states, layer.attention_norm)
            states = states + self._attention(layer, before, groups, turn)
            return states + self._mlp(layer, self._norm(states, layer.mlp_norm))
        assert layer.attention_norm is not None
        states = self._norm(states + self._attention(layer, states, groups, turn), layer.attention_norm)
        return self._norm(states + self._mlp(layer, states), layer.mlp_norm)

    def _attention(
        self, layer: Layer, states: Tensor, groups: list[tuple[_Rectangle, Tensor | None]],
        turn: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        spec = self.spec
        qkv = _linear(states, layer.qkv).view(-1, 3, spec.num_heads, spec.head_size)
        if turn is not None:
            qkv = torch.cat([_turned(qkv[:, :2], *turn), qkv[:, 2:]], dim=1)
        found = []
        for rectangle, mask in groups:
            # (inputs, longest, 3, heads, head size) to three of (inputs, heads, longest, head size)
            query, key, value = rectangle.spread(qkv[rectangle.span]).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            found.append(rectangle.gather(seen.transpose(1, 2)))
        mixed = found[0] if len(found) == 1 else torch.cat(found)
        return _linear(mixed.reshape(-1, spec.hidden_size), layer.out)

    def _mlp(self, layer: Layer, states: Tensor) -> Tensor:
        inner = _linear(states, layer.up)
        if self.spec.family.is_gated:
            first, gate = inner.chunk(2, dim=-1)
            return _linear(self._act(first) * gate, layer.down)
        return _linear(self._act(inner), layer.down)

    def _norm(self, states: Tensor, norm: Linear) -> Tensor:
        return F.layer_norm(states, (self.spec.hidden_size,), norm.weight, norm.bias, self.spec.norm_eps)

    def _turn(self, theta: float, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rotary positions: (tokens, 1, 1, head size)."""
        size = self.spec.head_size
        steps = theta ** -(torch.arange(0, size, 2, device=self.device, dtype=torch.float32) / size)
        angles = positions.float()[:, None] * steps
        angles = torch.cat([angles, angles], dim=-1)[:, None, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _turned(values: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    return values * cosines + torch.cat([-second, first], dim=-1) * sines


def _linear(states: Tensor, linear: Linear) -> Tensor:
    return F.linear(states, linear.weight, linear.bias)
