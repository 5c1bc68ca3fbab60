"""Keys and values of eight bits with a scale for each head and token, in torch operations.

Does: round what a step writes, read blocks back as floats. Does not: know the compiled forms (`cpu/kernels.py`, `cuda/`).
"""

from __future__ import annotations

import torch

TOP = 127  # the largest number


def to_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows (…, dim) -> numbers (…, dim) int8 and scales (…) float32: rows are numbers * scale, to half a scale."""
    largest = rows.float().abs().amax(dim=-1)
    inverse = torch.where(largest > 1e-30, TOP / largest, 0.0)  # smaller ones have no inverse
    return (rows.float() * inverse[..., None]).round_().to(torch.int8), largest * (1 / TOP)


class ScaledSlots:
    """The keys, or the values, of all layers, and the slots that a step writes."""

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor) -> None:
        """numbers (layers, blocks, block, kv heads, dim) int8; scales (layers, blocks, kv heads, block); slots (T,)."""
        block_size = numbers.shape[2]
        self._numbers, self._scales = numbers.unbind(0), scales.unbind(0)
        self._flat = numbers.flatten(1, 2).unbind(0)
        self._slots, self._blocks, self._offsets = slots, slots // block_size, slots % block_size

    def write(self, layer: int, rows: torch.Tensor) -> None:
        """rows (T, kv heads, dim), to their slots."""
        numbers, scales = to_int8(rows)
        self._flat[layer].index_copy_(0, self._slots, numbers)
        self._scales[layer][self._blocks, :, self._offsets] = scales

    def read(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """(blocks, block, kv heads, dim) float32."""
        scales = self._scales[layer].index_select(0, blocks).transpose(1, 2)  # (blocks, block, kv heads)
        return self._numbers[layer].index_select(0, blocks).float().mul_(scales[..., None])
