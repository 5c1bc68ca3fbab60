"""Working memory of a step: one piece per buffer, as large as the largest step so far, cut to size for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tonle.models.cpu.step import Buffers
from tonle.models.cpu.vector import GROUP, ROWS
from tonle.models.spec import ModelSpec

Array = npt.NDArray[Any]


class Workspace:
    def __init__(self, spec: ModelSpec, *, qkv_rows: int, num_threads: int) -> None:
        self._spec = spec
        self._qkv_rows = qkv_rows
        self._threads = num_threads
        self._memory: dict[str, Array] = {}
        self._cut: dict[int, Buffers] = {}  # by number of tokens
        self._longest = ROWS  # context the scores have room for

    def cut(self, num_tokens: int, longest: int) -> Buffers:
        """Buffers for a step of so many tokens whose contexts are at most `longest`; `logits` is the caller's."""
        if longest > self._longest:
            self._longest = 1 << (longest - 1).bit_length()
            self._cut.clear()
        if num_tokens not in self._cut:
            self._cut[num_tokens] = self._make(num_tokens)
        return self._cut[num_tokens]

    def _make(self, num_tokens: int) -> Buffers:
        spec, threads = self._spec, self._threads
        widest = max(spec.hidden_size, spec.intermediate_size, spec.q_size)
        shapes: dict[str, tuple[int, ...]] = {
            "hidden": (num_tokens, spec.hidden_size),
            "qkv": (num_tokens, self._qkv_rows),
            "q": (num_tokens, spec.num_heads, spec.head_dim),
            "mixed": (num_tokens, spec.q_size),
            "act": (num_tokens, spec.intermediate_size),
            "normed": (threads, num_tokens, spec.hidden_size),
            "total": (threads, num_tokens, ROWS),
            "tile": (threads, GROUP, ROWS),
            "sums": (threads, widest // GROUP),
            "scores": (threads, self._longest),
        }
        parts = {name: self._take(name, shape) for name, shape in shapes.items()}
        scratch = self._take("scratch", (threads, self._longest)).view(np.int32)
        return Buffers(**parts, logits=np.zeros((1, ROWS), np.float32), scratch=scratch)

    def _take(self, name: str, shape: tuple[int, ...]) -> Array:
        size = int(np.prod(shape))
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = aligned((size,), np.dtype(np.float32))
        return self._memory[name][:size].reshape(shape)


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Empty, starting at a cache line: a vector that straddles two costs twice."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
