"""The experts of a model in the layout that `cpu_experts.py` reads.

Does: stack all experts of all layers in one matrix of each kind, expert by expert, so that few of them are in memory twice. Does
not: know blocks and lanes (`pack.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tonle.models.cpu.cpu_experts import PackedExperts
from tonle.models.cpu.exponential import ACTIVATIONS
from tonle.models.cpu.layout import layout, row_order
from tonle.models.cpu.stored import Stored, from_floats, join
from tonle.models.spec import MixerSpec, ModelSpec

Array = npt.NDArray[Any]


def expert_layers(spec: ModelSpec) -> list[int]:
    """Those with experts; a layer's place in this list is its place in `PackedExperts`."""
    return [index for index, layer in enumerate(spec.layers) if layer.mixer.kind == "experts"]


def pack_experts(
    spec: ModelSpec, matrix: Callable[[str], Stored], vector: Callable[[str], Array], *, dots: bool
) -> PackedExperts | None:
    """None if no layer has any. Those that have some have the same."""
    layers = expert_layers(spec)
    if not layers:
        return None
    mixer = spec.layers[layers[0]].mixer
    routers = [f"model.layers.{index}.mlp.gate" for index in layers]
    experts = [f"model.layers.{index}.mlp.experts.{expert}" for index in layers for expert in range(mixer.num_experts)]

    def joined(path: str, *names: str) -> Stored:
        return join([matrix(f"{path}.{name}.weight") for name in names])

    return PackedExperts(
        router=layout([_router(mixer, index, matrix) for index in layers], gated=False, dots=False),
        router_bias=_biases([(path,) for path in routers], mixer.router_bias, np.arange(mixer.num_experts), vector),
        gate_up=layout(_Each(experts, lambda path: joined(path, "gate_proj", "up_proj")), gated=True, dots=dots),
        gate_up_bias=_biases([(f"{path}.gate_proj", f"{path}.up_proj") for path in experts], mixer.bias,
                             row_order(2 * mixer.size, gated=True), vector),
        down=layout(_Each(experts, lambda path: joined(path, "down_proj")), gated=False, dots=dots),
        down_bias=_biases([(f"{path}.down_proj",) for path in experts], mixer.bias, row_order(spec.hidden_size, gated=False),
                          vector),
        num_experts=mixer.num_experts,
        per_token=mixer.experts_per_token,
        normed=int(mixer.normed_shares),
        shared_gate=int(mixer.shared_gate),
        activation=ACTIVATIONS.index(mixer.activation),
        clamp=np.float32(mixer.clamp),
    )  # fmt: skip


class _Each(Sequence[Stored]):
    """Matrices that are read when asked for."""

    def __init__(self, paths: list[str], read: Callable[[str], Stored]) -> None:
        self._paths = paths
        self._read = read

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, place: Any) -> Any:
        return self._read(self._paths[place])


def _router(mixer: MixerSpec, index: int, matrix: Callable[[str], Stored]) -> Stored:
    """As floats, whatever it was stored as: which experts are chosen hangs on small differences."""
    paths = [f"model.layers.{index}.mlp.gate.weight"]
    if mixer.shared_gate:
        paths.append(f"model.layers.{index}.mlp.shared_expert_gate.weight")
    return from_floats(np.concatenate([matrix(path).floats() for path in paths]))


def _biases(paths: list[tuple[str, ...]], has: bool, order: Array, vector: Callable[[str], Array]) -> Array:
    """(matrices, rows in blocks), or (matrices, 0) without."""
    made = np.zeros((len(paths), len(order) if has else 0), dtype=np.float32)
    if has:
        for place, names in enumerate(paths):
            whole = np.concatenate([vector(f"{name}.bias") for name in names])
            made[place] = np.append(whole, np.float32(0))[order]
    return made
