"""The tensors of one step: the only thing the engine's runner hands to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch


@dataclass(slots=True)
class StepInputs:
    """T tokens of R rows, flattened; the rows with exactly one token come first.

    A row is one sequence. Its tokens of this step are `tokens[row_starts[r]:row_starts[r + 1]]`; everything before them is
    in the KV cache already, in the blocks `block_tables[r]` names.
    """

    tokens: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64, place in the sequence
    slots: torch.Tensor  # (T,) int64, block * block_size + offset: where this token's key and value go
    row_starts: list[int]  # R + 1 offsets into the T tokens
    context_lens: list[int]  # R; tokens of the row in cache once this step's are written
    block_tables: torch.Tensor  # (R, max_blocks) int32, unused entries 0
    num_decode: int  # the first so many rows have one token each
    logit_indices: torch.Tensor  # (S,) int64 into the T tokens: whose logits are wanted
    hidden_indices: torch.Tensor | None = (
        None  # (P,) int64 into the T tokens: whose hidden states `forward_hidden` gives
    )
    adapter_slots: list[int] | None = None  # R; the slot of the row's adapter, -1 = none; None = no row has one


class LayerCache(NamedTuple):
    """Keys and values of one layer; of eight bits also what each head of each token is multiplied with."""

    k: torch.Tensor  # (blocks, block, kv heads, D)
    v: torch.Tensor
    k_scales: torch.Tensor | None = None  # (blocks, kv heads, block) float32
    v_scales: torch.Tensor | None = None


class KVCache:
    """Keys and values of every layer in blocks of `block_size` tokens."""

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.k = _zeros(shape, dtype, device)
        self.v = _zeros(shape, dtype, device)
        self.k_scales: torch.Tensor | None = None
        self.v_scales: torch.Tensor | None = None
        if dtype == torch.float8_e4m3fn:
            scales = (num_layers, num_blocks, num_kv_heads, block_size)
            self.k_scales, self.v_scales = (torch.zeros(scales, dtype=torch.float32, device=device) for _ in range(2))

    def layer(self, index: int) -> LayerCache:
        if self.k_scales is None or self.v_scales is None:
            return LayerCache(self.k[index], self.v[index])
        return LayerCache(self.k[index], self.v[index], self.k_scales[index], self.v_scales[index])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zero, so that what a mask hides is never NaN. On a CPU the pages come from the system as they are first used."""
    if device.type == "cpu" and dtype == torch.float32:
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    return torch.zeros(shape, dtype=dtype, device=device)
