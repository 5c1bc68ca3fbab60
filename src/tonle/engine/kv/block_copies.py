"""`BlockCopies`: whole KV blocks as bytes, out of the cache and into it. All that leaves a cache or comes into it goes this way.

One block is `block_bytes` bytes: the keys of all layers, their values, then the scales of both where the cache has them; each as
the cache stores it, (layers, block, kv heads, dim) and (layers, kv heads, block).
Does: copy. Does not: know which block holds what.
"""

from __future__ import annotations

import numpy as np
import torch

from tonle.models.inputs import KVCache


class PendingRead:
    """Copies of blocks that are on their way to the host."""

    def __init__(
        self, data: torch.Tensor, copied: torch.cuda.Event | None, gathered: torch.Tensor | None = None
    ) -> None:
        self._data = data
        self._copied = copied
        self._gathered = gathered  # the device's own copy, which must last as long

    def wait(self) -> torch.Tensor:
        """(n, block_bytes) uint8 on the host. From any thread, once."""
        if self._copied is not None:
            self._copied.synchronize()
        self._gathered = None
        return self._data


class BlockCopies:
    def __init__(self, kv: KVCache) -> None:
        parts = [part for part in (kv.k, kv.v, kv.k_scales, kv.v_scales) if part is not None]
        # (layers, blocks, bytes of one layer's block)
        self._parts = [part.view(torch.uint8).flatten(2) for part in parts]
        self._device = kv.k.device
        self._cuda = self._device.type == "cuda"
        self._arrays = [] if self._cuda else [part.numpy() for part in self._parts]
        self._reading: torch.cuda.Stream | None = None  # beside steps, which go on meanwhile
        if self._cuda:
            self._reading = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.num_layers = kv.k.shape[0]
        self.block_bytes = sum(part.shape[0] * part.shape[2] for part in self._parts)

    def host_buffer(self, num_blocks: int) -> torch.Tensor:
        """(num_blocks, block_bytes) uint8, pinned where the cache is on a GPU. What it holds is undefined."""
        shape = (num_blocks, self.block_bytes)
        if not self._cuda:
            return torch.empty(shape, dtype=torch.uint8)
        with torch.cuda.device(self._device):  # of the thread that asks
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    @torch.inference_mode()
    def read(self, blocks: list[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """Copies of these blocks, (n, block_bytes) on the host; returns when they are there.

        From any thread, if the blocks are held and full, and the step that filled them was collected: nobody writes to such.
        """
        out = self.host_buffer(len(blocks)) if out is None else out
        if self._cuda:
            with torch.cuda.device(self._device), torch.cuda.stream(self._reading):
                out.copy_(self._gathered(blocks), non_blocking=True)
                assert self._reading is not None
                self._reading.synchronize()
            return out
        rows, begin = out.numpy(), 0
        for array in self._arrays:
            end = begin + array.shape[0] * array.shape[2]
            for row, block in zip(rows, blocks, strict=True):
                row[begin:end].reshape(array.shape[0], -1)[:] = array[:, block]
            begin = end
        return out

    @torch.inference_mode()
    def read_later(self, blocks: list[int]) -> PendingRead:
        """Copies of these blocks as the steps launched so far leave them, whatever later ones do. On the loop's thread.

        On a GPU the device sets them aside in the order of steps, and sends them to the host beside the steps that follow.
        """
        if not self._cuda:
            return PendingRead(self.read(blocks), None)
        out = self.host_buffer(len(blocks))
        with torch.cuda.device(self._device):
            assert self._reading is not None
            gathered = self._gathered(blocks)
            self._reading.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._reading):
                out.copy_(gathered, non_blocking=True)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
        return PendingRead(out, copied, gathered)

    @torch.inference_mode()
    def write(self, blocks: list[int], data: torch.Tensor) -> None:
        """data (n, block_bytes) uint8 on the host, into these blocks. On the loop's thread, between steps.

        On a GPU it returns before they are there; steps launched later find them. `data` must not be written to again.
        """
        assert data.shape == (len(blocks), self.block_bytes), "not as many bytes as blocks have"
        if self._cuda:
            self._scatter(blocks, data.to(self._device, non_blocking=True))
            return
        rows, begin = data.numpy(), 0
        for array in self._arrays:
            end = begin + array.shape[0] * array.shape[2]
            for row, block in zip(rows, blocks, strict=True):
                array[:, block] = row[begin:end].reshape(array.shape[0], -1)
            begin = end

    def _gathered(self, blocks: list[int]) -> torch.Tensor:
        index = torch.from_numpy(np.asarray(blocks)).to(self._device)
        found = [part.index_select(1, index).transpose(0, 1).flatten(1) for part in self._parts]
        return torch.cat(found, dim=1)

    def _scatter(self, blocks: list[int], data: torch.Tensor) -> None:
        index = torch.from_numpy(np.asarray(blocks)).to(self._device)
        begin = 0
        for part in self._parts:
            end = begin + part.shape[0] * part.shape[2]
            part.index_copy_(1, index, data[:, begin:end].reshape(len(blocks), part.shape[0], -1).transpose(0, 1))
            begin = end
