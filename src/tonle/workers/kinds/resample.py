"""`Resampler`: sound at another rate, block by block, without what the new rate cannot hold.

Does: filter with a windowed sinc, one row of taps for each place an output can have between two inputs. Does not: mix channels
or know files.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]  # shape (n,): mono, -1 to 1

MAX_PHASES = (
    640  # 11,025 → 16,000 Hz needs 640; of odder rates the nearest ratio is taken, off by less than 3 in a million
)
_ZEROS = 16  # zero crossings of the sinc on each side
_BETA = 8.0  # of the Kaiser window: about 80 dB
_ROLL_OFF = 0.94  # of the lower Nyquist frequency: where the filter begins to close


class Resampler:
    """`push` blocks, then `finish`. What comes out has the length of what went in, at the new rate."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        ratio = Fraction(from_hz, to_hz).limit_denominator(MAX_PHASES)
        self._step, self._phases = ratio.numerator, ratio.denominator  # so many inputs make so many outputs
        slower = max(1.0, from_hz / to_hz)
        half = int(np.ceil(_ZEROS * slower))  # taps on each side
        self._taps = 2 * half
        # Shape (phases, taps): where each tap lies, in inputs from the output.
        fraction = np.arange(self._phases)[:, None] * self._step % self._phases / self._phases
        place = np.arange(self._taps)[None, :] - (half - 1) - fraction
        rows = (
            np.sinc(place * _ROLL_OFF / slower)
            * np.kaiser(2 * 512 + 1, _BETA)[np.clip((place / half + 1) * 512, 0, 1024).astype(np.int64)]
        )
        self._rows = (rows / rows.sum(axis=1, keepdims=True)).astype(np.float32)
        self._held = np.zeros(half - 1, np.float32)  # inputs that later outputs need
        self._same = from_hz == to_hz
        self._num_in = self._num_out = 0

    def push(self, samples: Samples) -> Samples:
        if self._same:
            return samples
        self._num_in += len(samples)
        self._held = np.concatenate((self._held, samples))
        cycles = (len(self._held) - self._taps) // self._step  # whole ones, so that each block begins at phase 0
        if cycles < 1:
            return np.empty(0, np.float32)
        out = np.empty((cycles, self._phases), np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(self._held, self._taps)
        for phase in range(self._phases):
            first = phase * self._step // self._phases
            out[:, phase] = windows[first :: self._step][:cycles] @ self._rows[phase]
        self._held = self._held[cycles * self._step :].copy()
        self._num_out += out.size
        return out.reshape(-1)

    def finish(self) -> Samples:
        """The rest."""
        if self._same:
            return np.empty(0, np.float32)
        wanted = round(self._num_in * self._phases / self._step) - self._num_out
        rest = self.push(np.zeros(self._taps + 2 * self._step, np.float32))
        return rest[: max(0, wanted)]
