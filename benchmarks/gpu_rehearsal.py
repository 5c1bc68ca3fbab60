"""Every cut compiled and checked in a process of its own kind, before any is timed.

Does: products on random inputs against float32, and the same in several processes at once, which leaves the compiled kernels
in triton's cache. A cut that does not compile, reads or writes where it must not, or hangs, takes a worker with it and not
the benchmark. Does not: measure time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu_cuts import Product
from tonle.models.cuda.pointwise import silu_mul
from tonle.models.cuda.skinny import SplitScratch, skinny
from tonle.models.cuda.skinny_cuts import Cut

MAX_ERROR = 1e-2  # of the largest output
_GUARD = 8  # rows behind x and out: the first are NaN, the second must stay as they are
_CHAIN = 3  # launches right after one another, so that one which does not wait for the one ahead shows
_MARK = 7.0


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One cut of one product, with every number of rows it is to be timed with."""

    product: Product
    cut: Cut
    rows: tuple[int, ...]


class Weights:
    """Copies of one product's matrix, its bias, and scratch; random."""

    def __init__(self, product: Product, copies: int, device: torch.device) -> None:
        self.product = product
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # triton's interpreter has no bfloat16
        shape = (product.weight_rows, product.inputs)
        self.copies = [
            torch.randn(shape, device=device, dtype=self.dtype).mul_(product.inputs**-0.5) for _ in range(copies)
        ]
        self.bias = torch.randn(product.weight_rows, device=device, dtype=self.dtype) if product.bias else None
        self.device = device
        self._scratch: SplitScratch | None = None

    def scratch(self, cut: Cut, rows: int) -> SplitScratch | None:
        """Parts start as NaN: one that is read before it was written shows."""
        if cut.split == 1:
            return None
        parts = cut.num_parts(rows, self.product.outputs, glu=self.product.glu)
        tiles = cut.num_tiles(rows, self.product.outputs)
        made = self._scratch
        if made is None or made.parts.numel() < parts or made.arrived.numel() < tiles:
            made = self._scratch = SplitScratch(parts, tiles, self.device)
        made.parts.fill_(torch.nan)
        return made


@dataclass(slots=True, eq=False)
class Scene:
    """One product with one number of rows: inputs, and what must come out."""

    weights: Weights
    rows: int
    x: torch.Tensor = field(init=False)
    out: torch.Tensor = field(init=False)
    _wide: torch.Tensor = field(init=False)  # gate and up of cuBLAS
    _old: torch.Tensor = field(init=False)
    _expected: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        product, like = self.weights.product, self.weights.copies[0]
        whole = like.new_full((self.rows + _GUARD, product.inputs), torch.nan)
        self.x = whole[: self.rows].normal_()
        self.out = like.new_zeros(self.rows, product.outputs)
        self._wide = like.new_zeros(self.rows, product.weight_rows)
        self._old = like.new_zeros(self.rows, product.outputs).normal_()
        self._expected = [self._reference(weight) for weight in self.weights.copies[:_CHAIN]]

    def _reference(self, weight: torch.Tensor) -> torch.Tensor:
        bias = self.weights.bias
        y = torch.nn.functional.linear(self.x.float(), weight.float(), None if bias is None else bias.float())
        if self.weights.product.glu:
            gate, up = y.chunk(2, dim=-1)
            y = torch.nn.functional.silu(gate) * up
        return y + self._old.float() if self.weights.product.add else y

    def ours(self, cut: Cut) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """(weight, out) -> nothing: one launch."""
        product, scratch = self.weights.product, self.weights.scratch(cut, self.rows)

        def launch(weight: torch.Tensor, out: torch.Tensor) -> None:
            skinny(self.x, weight, out, cut, bias=self.weights.bias, add=product.add, glu=product.glu, scratch=scratch)

        return launch

    def cublas(self, weight: torch.Tensor, out: torch.Tensor) -> None:
        """What the model does without `skinny`."""
        product, bias = self.weights.product, self.weights.bias
        into = self._wide if product.glu else out
        if product.add:
            out.addmm_(self.x, weight.t())
        elif bias is not None:
            torch.addmm(bias, self.x, weight.t(), out=into)
        else:
            torch.mm(self.x, weight.t(), out=into)
        if product.glu:
            silu_mul(self._wide, out)

    def error(self, launch: Callable[[torch.Tensor, torch.Tensor], None]) -> float:
        """Largest difference from float32, as a share of the largest output; NaN where something was left out."""
        outs = []
        for _ in self._expected:
            whole = self.out.new_full((self.rows + _GUARD, self.out.shape[1]), _MARK)
            whole[: self.rows] = self._old if self.weights.product.add else torch.nan
            outs.append(whole)
        for weight, out in zip(self.weights.copies, outs, strict=False):
            launch(weight, out[: self.rows])
        worst = 0.0
        for expected, out in zip(self._expected, outs, strict=True):
            if not bool((out[self.rows :] == _MARK).all()):
                return float("nan")
            share = float((out[: self.rows].float() - expected).abs().max() / expected.abs().max())
            worst = share if not share <= worst else worst  # NaN stays
            if worst != worst:
                return worst
        return worst


def check(rehearsal: Rehearsal, weights: Weights) -> str | None:
    """What is wrong with a cut, or None."""
    for rows in rehearsal.rows:
        scene = Scene(weights, rows)
        error = scene.error(scene.ours(rehearsal.cut))
        if not error < MAX_ERROR:
            return f"{rows} rows: off by {error:.2g} of the largest output"
    return None


def _work(device: str, tasks: Any, answers: Any) -> None:
    """A worker's life: check until there is nothing left, or the device is lost."""
    weights: Weights | None = None
    with torch.inference_mode(), contextlib.suppress(queue.Empty):
        while True:
            rehearsal: Rehearsal = tasks.get(timeout=5.0)
            try:
                if weights is None or weights.product != rehearsal.product:
                    weights = Weights(rehearsal.product, _CHAIN, torch.device(device))
                answers.put((rehearsal, check(rehearsal, weights)))
            except Exception as problem:
                lines = str(problem).strip().splitlines()
                answers.put((rehearsal, f"{type(problem).__name__}: {lines[0][:200] if lines else ''}"))
                try:
                    if device == "cuda":
                        torch.cuda.synchronize()
                except Exception:
                    return  # an illegal access: nothing works in this process any more


def rehearse(
    rehearsals: Sequence[Rehearsal], *, workers: int, device: str, limit_s: float
) -> dict[tuple[Product, Cut], str | None]:
    """What is wrong with each cut; None = nothing. Those without an answer in time are not named."""
    context = multiprocessing.get_context("spawn")
    tasks, answers = context.Queue(), context.Queue()
    for rehearsal in rehearsals:
        tasks.put(rehearsal)

    def start() -> Any:
        process = context.Process(target=_work, args=(device, tasks, answers), daemon=True)
        process.start()
        return process

    crew = [start() for _ in range(min(workers, len(rehearsals)))]
    verdicts: dict[tuple[Product, Cut], str | None] = {}
    spares = 2 * workers
    end = time.monotonic() + limit_s
    while len(verdicts) < len(rehearsals) and time.monotonic() < end:
        try:
            rehearsal, problem = answers.get(timeout=0.5)
            verdicts[rehearsal.product, rehearsal.cut] = problem
        except queue.Empty:
            for place, process in enumerate(crew):
                if not process.is_alive() and spares > 0 and not tasks.empty():
                    crew[place] = start()
                    spares -= 1
            if tasks.empty() and not any(process.is_alive() for process in crew):
                break
    tasks.cancel_join_thread()  # what nobody took must not hold up the end of this process
    for process in crew:
        process.terminate()
    for process in crew:
        process.join(10.0)
    return verdicts
