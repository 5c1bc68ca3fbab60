"""The tensors of one step: the only thing the engine's runner hands to a model."""

from __future__ import annotations

import ctypes
import mmap
import sys
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


SCALED = (torch.float8_e4m3fn, torch.int8)  # dtypes of keys and values that have a scale for each head and token


class LayerCache(NamedTuple):
    """Keys and values of one layer; of eight bits also what each head of each token is multiplied with."""

    k: torch.Tensor  # (blocks, block, kv heads, D)
    v: torch.Tensor
    k_scales: torch.Tensor | None = None  # (blocks, kv heads, block) float32
    v_scales: torch.Tensor | None = None

    def as_bytes(self) -> LayerCache:
        """Numbers of eight bits as their bits, for devices that do not know the type; others as they are."""
        if self.k_scales is None:
            return self
        return self._replace(k=self.k.view(torch.uint8), v=self.v.view(torch.uint8))


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
        if dtype in SCALED:
            scales = (num_layers, num_blocks, num_kv_heads, block_size)
            self.k_scales, self.v_scales = (_zeros(scales, torch.float32, device) for _ in range(2))

    def release_memory(self) -> None:
        """All blocks are zero, and on a CPU take no memory until they are written to. Elsewhere nothing happens."""
        for part in (self.k, self.v, self.k_scales, self.v_scales):
            if part is not None and part.device.type == "cpu":
                release_pages(part.data_ptr(), part.nbytes)

    def layer(self, index: int) -> LayerCache:
        if self.k_scales is None or self.v_scales is None:
            return LayerCache(self.k[index], self.v[index])
        return LayerCache(self.k[index], self.v[index], self.k_scales[index], self.v_scales[index])


def release_pages(address: int, num_bytes: int) -> None:
    """Whole pages in there are zero and the system's, until they are written to. On Linux; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zero, so that what a mask hides is never NaN. On a CPU the pages come from the system as they are first used."""
    if device.type == "cpu" and dtype in (torch.float32, torch.int8):
        return torch.from_numpy(np.zeros(shape, dtype=np.float32 if dtype == torch.float32 else np.int8))
    return torch.zeros(shape, dtype=dtype, device=device)
