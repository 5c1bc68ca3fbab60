"""`Adapter`: what a LoRA adapter adds to a model, as plain tensors on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

MODULES = ("q", "k", "v", "o", "gate", "up", "down")  # the matrices of a layer that an adapter may change


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
