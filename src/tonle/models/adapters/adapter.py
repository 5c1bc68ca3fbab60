"""`Adapter`: what a LoRA adapter adds to a model, as plain tensors on the host; and its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

# The matrices of a layer that an adapter may change, and where checkpoints have them (model.layers.N. ….weight).
MODULE_PATHS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
MODULES = tuple(MODULE_PATHS)
_ADDING = ("o", "down")  # those whose products are added to the hidden states
MAX_RANK = 256  # no setting allows more


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPart:
    """Adds b @ a to one matrix (out, in). float32, on the host; the adapter's scaling is folded into b."""

    a: torch.Tensor  # (rank, in)
    b: torch.Tensor  # (out, rank)

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """All parts of one adapter, by (layer, module); a module it does not change has none."""

    digest: str  # SHA-256, hex, of what it computes: equal adapters have equal digests, whatever they are called
    parts: dict[tuple[int, str], AdapterPart] = field(repr=False)

    @property
    def rank(self) -> int:
        """The largest of its parts."""
        return max((part.rank for part in self.parts.values()), default=0)

    @property
    def num_bytes(self) -> int:
        return sum(part.a.nbytes + part.b.nbytes for part in self.parts.values())

    def added_at(self, residual_scale: float) -> Adapter:
        """For weights that have `ModelSpec.residual_scale` in them: what it adds to these has it, too."""
        if residual_scale == 1:
            return self
        changed = {
            place: AdapterPart(part.a, part.b * residual_scale)
            for place, part in self.parts.items()
            if place[1] in _ADDING
        }
        return replace(self, parts=self.parts | changed)


class HeldAdapter(Protocol):
    """An adapter in the host's memory in the form its backend takes: `Adapter` itself, or what the backend made of it."""

    @property
    def digest(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


def digest_of(parts: Mapping[tuple[int, str], AdapterPart]) -> str:
    """SHA-256, hex, over each part's place, shapes and numbers, in the order of layers and `MODULES`."""
    digest = hashlib.sha256()
    for layer, module in sorted(parts, key=lambda place: (place[0], MODULES.index(place[1]))):
        part = parts[layer, module]
        digest.update(f"{layer} {module} {tuple(part.a.shape)} {tuple(part.b.shape)}\n".encode())
        for tensor in (part.a, part.b):
            digest.update(tensor.contiguous().numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()
