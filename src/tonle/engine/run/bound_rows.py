"""The second draw of a CUDA step: for rows that may get only some tokens, from masked logits.

Does: own the pinned masks and bring them to the device with what the draw needs to know, in one copy; replace what the step
drew for these rows, from a CUDA graph where no penalties are to be applied. Does not: know grammars or plans. Other rows of the
step do not notice.
"""

from __future__ import annotations

import numpy as np
import torch

from tonle.engine.run import graphs
from tonle.engine.run.packing import RING
from tonle.engine.run.settings import DrawNumbers, RowSampling
from tonle.models.cuda.mask import put_drawn
from tonle.models.cuda.model import CudaModel

_PIECE_ROWS = 128  # drawn at a time: their logits, float32, take 78 MB of 152,000 tokens, which the reserve holds
_RUNGS = (4, 16, 32, 64, 128)  # rows that graphs of the draw are made for, when they are first needed
_FIRST_ROWS = 32


class _Layout:
    """One int32 buffer for up to `capacity` rows: the numbers of a draw, then the masks."""

    def __init__(self, capacity: int, words: int) -> None:
        self.capacity = capacity  # a multiple of 32, so that every part begins at a multiple of 128 bytes
        self.words = words
        self.masks_at = 5 * capacity + 32
        self.size = self.masks_at + capacity * words

    def numbers(self, buffer: torch.Tensor) -> torch.Tensor:
        """(3, capacity): rows, positions, which mask."""
        return buffer[2 * self.capacity : 5 * self.capacity].view(3, self.capacity)

    def places(self, buffer: torch.Tensor) -> torch.Tensor:
        """(capacity,) int64: among the step's samples."""
        return buffer[: 2 * self.capacity].view(torch.int64)

    def count(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[5 * self.capacity : 5 * self.capacity + 1]

    def masks(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.masks_at :].view(self.capacity, self.words)


class BoundRows:
    def __init__(self, model: CudaModel, row_sampling: RowSampling, *, capture: bool) -> None:
        self._capture = capture
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._model = model
        self._row_sampling = row_sampling
        self._device = model.logits.device
        self._layout: _Layout | None = None  # None: no row was ever bound
        self._host: list[torch.Tensor] = []  # one is written while the copies of earlier ones are under way
        self._buffer = torch.empty(0)
        self._logits = torch.empty(0)
        self._turn = 0

    def masks(self, count: int, words: int) -> np.ndarray:
        """Where to write masks (count, words) for the next `draw`."""
        if self._layout is None or self._layout.capacity < count:
            self._allocate(count, words)
        assert self._layout is not None and self._layout.words == words
        self._turn = (self._turn + 1) % RING
        masks: np.ndarray = self._layout.masks(self._host[self._turn])[:count].numpy()
        return masks

    def _allocate(self, count: int, words: int) -> None:
        assert words == -(-self._model.spec.vocab_size // 32), "masks of another vocabulary"
        capacity = _FIRST_ROWS
        while capacity < count:
            capacity *= 2
        self._layout = layout = _Layout(capacity, words)
        cuda = self._device.type == "cuda"
        self._host = [torch.zeros(layout.size, dtype=torch.int32, pin_memory=cuda) for _ in range(RING)]
        self._buffer = torch.zeros(layout.size, dtype=torch.int32, device=self._device)
        self._logits = torch.zeros(min(capacity, _PIECE_ROWS), self._model.spec.vocab_size, device=self._device)
        self._drawn = torch.zeros(min(capacity, _PIECE_ROWS), dtype=torch.int32, device=self._device)
        self._graphs.clear()  # of the buffers before

    def draw(self, places: list[int], rows: list[int], positions: list[int], is_filled: list[bool]) -> None:
        """Tokens of `rows`, at `places` among the step's samples, by the masks that were written last: row for row, if filled.
        A row whose mask is not filled keeps its token, unless its logits are adjusted, which the step has left to this draw."""
        drawn = [i for i, filled in enumerate(is_filled) if filled or self._row_sampling.adjusts(rows[i])]
        if not drawn:
            return
        layout, host = self._layout, self._host[self._turn]
        assert layout is not None
        for i in drawn:
            if not is_filled[i]:
                layout.masks(host)[i] = -1  # all bits
        count = len(drawn)
        layout.count(host)[0] = count
        layout.places(host).numpy()[:count] = [places[i] for i in drawn]
        layout.numbers(host).numpy()[:, :count] = [[rows[i] for i in drawn], [positions[i] for i in drawn], drawn]
        size = layout.masks_at + (drawn[-1] + 1) * layout.words
        self._buffer[:size].copy_(host[:size], non_blocking=True)
        if self._capture and count <= _PIECE_ROWS and not any(self._row_sampling.adjusts(rows[i]) for i in drawn):
            self._draw_graph(layout, count)
            return
        for first in range(0, count, _PIECE_ROWS):
            self._draw_piece(layout, first, [rows[i] for i in drawn[first : first + _PIECE_ROWS]])

    def _draw_graph(self, layout: _Layout, count: int) -> None:
        rung = min(next(rung for rung in _RUNGS if rung >= count), layout.capacity)
        if rung not in self._graphs:
            self._graphs[rung] = graphs.captured(lambda: self._draw_rung(layout, rung), None)
        self._graphs[rung].replay()

    def _draw_rung(self, layout: _Layout, rung: int) -> None:
        """Of up to `rung` rows, as many as the buffer says."""
        places, count = layout.places(self._buffer)[:rung], layout.count(self._buffer)
        numbers, logits, drawn = layout.numbers(self._buffer), self._logits[:rung], self._drawn[:rung]
        self._model.mask(places, numbers[2], layout.masks(self._buffer), logits)
        self._model.draw(count, numbers[0], numbers[1], logits, drawn)
        put_drawn(count, places, drawn, self._model.sampled)

    def _draw_piece(self, layout: _Layout, first: int, rows: list[int]) -> None:
        part = slice(first, first + len(rows))
        numbers, logits = layout.numbers(self._buffer)[:, part], self._logits[: len(rows)]
        on_device = DrawNumbers(
            places=layout.places(self._buffer)[part], count=layout.count(self._buffer), rows=numbers[0],
            positions=numbers[1],
        )  # fmt: skip
        self._model.mask(on_device.places, numbers[2], layout.masks(self._buffer), logits)
        self._row_sampling.draw_from(logits, rows, on_device)
