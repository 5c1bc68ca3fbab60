"""Perceptrons among which a router chooses, in torch operations: the reference form of a mixture of experts.

Does: route each token to its experts and add up what they give, expert by expert. Does not: run inside a CUDA graph (which
tokens an expert gets is known on the host only).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, relu, silu

from tonle.models.layers import Linear
from tonle.models.spec import SWIGLUOAI_ALPHA, Activation, MixerSpec


@dataclass(slots=True, eq=False)
class Perceptron:
    """Two products with an activation between them."""

    gate_up: Linear  # gate and up side by side; up alone in a plain one
    down: Linear


class Experts:
    """Gated perceptrons and the router that gives each token some of them; beside them one that every token has, or none."""

    def __init__(
        self, router: Linear, experts: list[Perceptron], spec: MixerSpec, shared: Perceptron | None = None,
        shared_gate: Linear | None = None,
    ) -> None:  # fmt: skip
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate  # to one number
        self._spec = spec

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows (T, hidden) -> (T, hidden)."""
        spec = self._spec
        shares, chosen = self.router(rows).float().softmax(dim=-1).topk(spec.experts_per_token)  # (T, k) each
        if spec.normed_shares:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(rows)
        own = spec.own_experts  # what the others give is added up with this (`parallel/`)
        for index in sorted(set(chosen.flatten().tolist()).intersection(own)):
            expert = self.experts[index - own.start]
            token, place = (chosen == index).nonzero(as_tuple=True)
            inner = gated(expert.gate_up(rows[token]), spec.activation, spec.clamp)
            out.index_add_(0, token, expert.down(inner) * shares[token, place, None].to(rows.dtype))
        if self.shared is not None:
            given = self.shared.down(gated(self.shared.gate_up(rows), spec.activation, spec.clamp))
            out += given if self.shared_gate is None else given * self.shared_gate(rows).sigmoid()
        return out


def gated(both: torch.Tensor, activation: Activation, clamp: float = 0.0) -> torch.Tensor:
    """both (T, 2 * size), gate and up side by side -> (T, size)."""
    gate, up = both.chunk(2, dim=-1)
    if activation == "swigluoai":
        gate = gate.clamp(max=clamp)
        return (gate * torch.sigmoid(SWIGLUOAI_ALPHA * gate)).mul_(up.clamp(-clamp, clamp).add_(1))
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
        case "swigluoai":
            raise AssertionError("swigluoai needs a gate")
