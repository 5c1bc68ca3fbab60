"""CUDA graphs of whole decode steps and of the two parts of mixed ones, over ladders of sizes.

Does: capture once at start, replay the smallest that fits, run without where none does. Does not: know plans. All graphs work on
the model's fixed buffers and read counts from the device, so a graph for n tokens serves every step of up to n. Where adapters
may be used there are two of each: a step none of whose rows has an adapter runs as it would without them.
"""

from __future__ import annotations

import contextlib
import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tonle.models.cuda.model import CudaModel

_DECODE: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_MIXED: tuple[int, ...] = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
_HEAD: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def rungs(ladder: tuple[int, ...], most: int) -> list[int]:
    """The ladder up to `most`, with `most` as its last rung unless it lies beyond the ladder."""
    below = [rung for rung in ladder if rung < most]
    return [*below, most] if most <= ladder[-1] else below


def max_tiles(tokens: int) -> int:
    """Room for prefill tiles in a mixed graph: enough for a few prompts. Empty tiles cost time, too."""
    return tokens // 32 + 8


_MANY_CHUNKS = 512  # up to so many tokens there are graphs of steps with many short chunks as well


def many_tiles(tokens: int) -> int:
    """Room for all chunks of a step: each has two tokens at least. Rows that a grammar makes jump forward have short ones."""
    return tokens // 2


class GraphSet:
    """The graphs of steps with adapters, or of those without."""

    def __init__(self, model: CudaModel, *, adapted: bool) -> None:
        self.adapted = adapted
        self._model = model
        self.decode: dict[int, torch.cuda.CUDAGraph] = {}
        self.mixed: dict[int, torch.cuda.CUDAGraph] = {}
        self.chunks: dict[int, torch.cuda.CUDAGraph] = {}  # of mixed steps with more tiles
        self.head: dict[int, torch.cuda.CUDAGraph] = {}
        self.decode_rungs: list[int] = []
        self.mixed_rungs: list[int] = []
        self.head_rungs: list[int] = []

    def __len__(self) -> int:
        return len(self.decode) + len(self.mixed) + len(self.chunks) + len(self.head)

    def capture(self, pool: Any) -> None:
        model, sizes, adapted = self._model, self._model.sizes, self.adapted
        self.decode_rungs = rungs(_DECODE, sizes.max_sequences)
        self.mixed_rungs = rungs(_MIXED, sizes.max_tokens)
        self.head_rungs = rungs(_HEAD, sizes.max_rows)
        for rows in reversed(self.decode_rungs):
            self.decode[rows] = captured(lambda n=rows: model.decode(n, adapted=adapted), pool)  # type: ignore[misc]
        for tokens in reversed(self.mixed_rungs):
            self.mixed[tokens] = captured(
                lambda n=tokens: model.body(n, tiles=max_tiles(n), adapted=adapted),  # type: ignore[misc]
                pool,
            )
            if max_tiles(tokens) < many_tiles(tokens) and tokens <= _MANY_CHUNKS:
                self.chunks[tokens] = captured(
                    lambda n=tokens: model.body(n, tiles=many_tiles(n), adapted=adapted),  # type: ignore[misc]
                    pool,
                )
        for samples in reversed(self.head_rungs):
            self.head[samples] = captured(lambda n=samples: model.head(n, adapted=adapted), pool)  # type: ignore[misc]


class Graphs:
    """Runs steps, from a graph where there is one."""

    def __init__(self, model: CudaModel, *, capture: bool) -> None:
        self._model = model
        self._base = GraphSet(model, adapted=False)
        self._adapted = GraphSet(model, adapted=True)
        self.capture_s = 0.0
        if capture:
            with _no_garbage():
                self._capture_all()

    @property
    def num_graphs(self) -> int:
        return len(self._base) + len(self._adapted)

    @property
    def num_adapted(self) -> int:
        """Of them, those of steps with adapters."""
        return len(self._adapted)

    @property
    def sizes(self) -> dict[str, list[int]]:
        """That steps are padded to: rows that decode; tokens of a mixed step, and those of it that sample."""
        base = self._base
        return {"decode": base.decode_rungs, "mixed": base.mixed_rungs, "head": base.head_rungs} if len(base) else {}

    def decode(self, num_rows: int, *, adapted: bool = False) -> None:
        """The whole of a step where every row goes on from its last token."""
        graphs = self._adapted if adapted else self._base
        rung = _smallest(graphs.decode_rungs, num_rows)
        if rung is None:
            self._model.decode(num_rows, adapted=adapted)
        else:
            graphs.decode[rung].replay()

    def body(self, num_tokens: int, num_tiles: int, *, adapted: bool = False) -> None:
        """A mixed step up to the last layer's attention."""
        graphs = self._adapted if adapted else self._base
        rung = _smallest(graphs.mixed_rungs, num_tokens)
        if rung is not None and num_tiles <= max_tiles(rung):
            graphs.mixed[rung].replay()
        elif rung in graphs.chunks and num_tiles <= many_tiles(rung):
            graphs.chunks[rung].replay()
        else:
            self._model.body(num_tokens, tiles=num_tiles, adapted=adapted)

    def head(self, num_samples: int, *, adapted: bool = False) -> None:
        """The rest of a mixed step, for the tokens that sample."""
        graphs = self._adapted if adapted else self._base
        rung = _smallest(graphs.head_rungs, num_samples)
        if rung is None:
            self._model.head(num_samples, adapted=adapted)
        else:
            graphs.head[rung].replay()

    def _capture_all(self) -> None:
        began = time.monotonic()
        self._model.batch.all.zero_()  # no rows: kernels run and write nothing
        pool = torch.cuda.graph_pool_handle()
        self._base.capture(pool)
        if self._model.adapters is not None:
            self._adapted.capture(pool)
        torch.cuda.synchronize()
        self.capture_s = time.monotonic() - began


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Collect what is left of earlier engines now, not in a capture: to free a graph there would end it with an error."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def captured(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    work()  # loads kernels and lets cuBLAS make its choices
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph


def _smallest(ladder: list[int], wanted: int) -> int | None:
    """The first rung that holds `wanted`, or None."""
    at = bisect_left(ladder, wanted)
    return ladder[at] if at < len(ladder) else None
