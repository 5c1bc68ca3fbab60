"""Rotary position encoding: frequencies of each kind of scaling, and turning queries and keys.

Does: cos and sin for the tokens of a step, the rotation itself. Does not: keep tables; a step computes its own angles
once, for every layer. The rotated part of a head, all of it or its first numbers, is laid out in two halves (number i turns
with i + rotated / 2).
"""

from __future__ import annotations

import math

import torch

from tonle.models.spec import RopeSpec


class Rotary:
    """Angles for any position."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._scale = spec.attention_factor
        self._frequencies = frequencies(spec, head_dim).to(device)  # (rotated / 2,) float32

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for `rotate`, each (T, 1, rotated). The first half of sin is negated already."""
        turns = positions[:, None].float() * self._frequencies  # (T, rotated / 2)
        cos, sin = turns.cos() * self._scale, turns.sin() * self._scale
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first numbers of heads (T, heads, head_dim), as many as there are angles, by those of their tokens."""
    rotated = cos.shape[-1]
    turned = heads[..., :rotated]
    first, second = turned.chunk(2, dim=-1)
    turned = torch.addcmul(turned * cos, torch.cat((second, first), dim=-1), sin)
    return turned if rotated == heads.shape[-1] else torch.cat((turned, heads[..., rotated:]), dim=-1)


def frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of rotated numbers, (rotated / 2,) float32."""
    rotated = head_dim if spec.rotated is None else spec.rotated
    waves = spec.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)  # positions per radian
    plain = 1.0 / waves
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain, rotated)
    if spec.kind == "factors":
        return 1.0 / (torch.tensor(spec.factors, dtype=torch.float32) * waves)
    return plain


def _llama3(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Short waves stay, long waves are stretched, those between are blended."""
    turns = spec.original_max_positions * plain / (2 * math.pi)  # full turns within the original context
    keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * plain + (1 - keep) * plain / spec.factor


def _yarn(spec: RopeSpec, plain: torch.Tensor, rotated: int) -> torch.Tensor:
    """As llama3, with the blend a ramp over dimensions instead of over wave lengths."""

    def dimension(turns: float) -> float:
        """The (fractional) pair of dimensions that makes so many turns within the original context."""
        return rotated * math.log(spec.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = (torch.arange(rotated // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretch = ramp.clamp(0, 1)
    return stretch * plain / spec.factor + (1 - stretch) * plain
