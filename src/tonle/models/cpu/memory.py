"""Memory that starts at a cache line."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tonle.models.cpu.vector import LINE

Array = npt.NDArray[Any]


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Empty. A vector that straddles two lines costs twice; what others write to the same line costs more."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + 2 * LINE, dtype=np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size].view(dtype).reshape(shape)
