"""Perceptrons among which a router chooses, in torch operations: the reference form of a mixture of experts.

Does: route each token to its experts and add up what they give, expert by expert. Does not: run inside a CUDA graph (which
tokens an expert gets is known on the host only).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, relu, silu

from tonle.models.layers import Linear
from tonle.models.spec import Activation, MixerSpec


@dataclass(slots=True, eq=False)
class Perceptron:
    """Two products with an activation between them."""

    gate_up: Linear  # gate and up side by side; up alone in a plain one
    down: Linear


class Experts:
    """Gated perceptrons and the router that gives each token some of them."""

    def __init__(self, router: Linear, experts: list[Perceptron], spec: MixerSpec) -> None:
        self.router = router
        self.experts = experts
        self._spec = spec

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows (T, hidden) -> (T, hidden)."""
        spec = self._spec
        shares, chosen = self.router(rows).float().softmax(dim=-1).topk(spec.experts_per_token)  # (T, k) each
        if spec.normed_shares:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(rows)
        for index in sorted(set(chosen.flatten().tolist())):
            expert = self.experts[index]
            token, place = (chosen == index).nonzero(as_tuple=True)
            inner = gated(expert.gate_up(rows[token]), spec.activation)
            out.index_add_(0, token, expert.down(inner) * shares[token, place, None].to(rows.dtype))
        return out


def gated(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """both (T, 2 * size), gate and up side by side -> (T, size)."""
    gate, up = both.chunk(2, dim=-1)
    return activate(gate, activation).mul_(up)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """A new tensor."""
    match activation:
        case "silu":
            return silu(x)
        case "gelu":
            return gelu(x)
        case "gelu_tanh":
            return gelu(x, approximate="tanh")
        case "relu2":
            return relu(x).square()
