"""`stretch`: speech slower or faster at the same pitch, for factors a synthesizer does not have. Does not: resample."""

from __future__ import annotations

import numpy as np

from tonle.workers.kinds.resample import Samples


def stretch(samples: Samples, factor: float, rate: int) -> Samples:
    """`factor` times as long. Windows of 40 ms are laid over each other where they fit best (WSOLA)."""
    size = rate // 25  # samples of a window
    half, reach = size // 2, size // 4
    if abs(factor - 1) < 0.01 or len(samples) < 2 * size:
        return samples
    padded = np.concatenate((samples, np.zeros(2 * size, np.float32)))
    window = np.hanning(size + 1)[:size].astype(np.float32)
    num = max(1, int(len(samples) * factor / half))
    out = np.zeros((num + 1) * half, np.float32)
    at = 0  # where the last window was taken
    for index in range(num):
        wanted = int(index * half / factor)
        if index:
            low = max(0, min(wanted - reach, len(padded) - 2 * size))
            follows = padded[at + half : at + half + half]  # what would come next
            near = np.lib.stride_tricks.sliding_window_view(padded[low : low + 2 * reach + half], half)
            at = low + int(np.argmax(near @ follows)) if len(follows) == half else wanted
        at = min(at, len(padded) - size)
        out[index * half : index * half + size] += padded[at : at + size] * window
    return out
