"""Products with few-bit weights on one GPU: each way and tiling against the time it takes to read the weight, and whole steps.

    python -m benchmarks.gpu_quantized one few many        # tilings of one row, of 1 to 16 on tensor cores, of many
    python -m benchmarks.gpu_quantized steps --forms bf16 fp8 int4
    python -m benchmarks.gpu_quantized steps --forms int4:gemv int4:pairs    # one row by one way or the other

Does: compare every result with float32 of the unpacked weight beforehand (one that is off is named and not timed), then print
for each product the fastest tilings beside the one its rule gives. Times are of CUDA graphs that walk through more copies of the
weights than L2 holds. Does not: measure through the engine (`benchmarks.gpu`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu

from benchmarks.gpu_products import Product, products_of
from benchmarks.gpu_step import fits, kernel_shares, machine, median_ms, plan_of, step_work
from benchmarks.quantizers import FORMS, quantize
from benchmarks.workload import READ_BYTES_PER_S, SHAPES
from tonle.models.cuda import quantized_matrix
from tonle.models.cuda.few_bits import table_words
from tonle.models.cuda.fp8_product import Fp8Scratch, Fp8Tiling, fp8_product, fp8_rows, fp8_tiling
from tonle.models.cuda.launch import compiling_only
from tonle.models.cuda.pair_gemv import PairTiling, pair_gemv, pair_gemv_tiling, suits
from tonle.models.cuda.quantized_dot import DotTiling, dot_tiling, quantized_dot
from tonle.models.cuda.quantized_gemv import QuantizedTiling, quantized_gemv, quantized_gemv_tiling
from tonle.models.cuda.skinny import SkinnyTiling, SplitScratch
from tonle.models.cuda.unpack import unpack
from tonle.models.packed import Packed, pack

_ROTATION_BYTES = 200_000_000  # of weights: more than three times L2
_MIN_LAUNCHES = 24  # per graph, so that its own start does not count
_REPEATS = 9
_EPS = 1e-5
STARTED = time.monotonic()
# Of the largest output. Rows in e4m3 have errors of 3 % each, which mostly cancel out in a sum of thousands.
MAX_ERROR = {"exact": 2e-2, "rounded": 1e-1}

Run = Callable[[Packed, torch.Tensor], object]  # packed weight, out


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make a product."""

    name: str
    run: Run
    chosen: bool = False  # what the rule gives
    precision: str = "exact"
    always: bool = False  # printed even if others are faster


class Case:
    """One product of a model in one form, with so many rows."""

    def __init__(self, product: Product, form: str, rows: int, device: torch.device) -> None:
        self.product, self.rows = product, rows
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32  # triton's interpreter has no bfloat16
        weight = torch.randn(product.weight_rows, product.inputs, device=device) * product.inputs**-0.5
        packed = pack(quantize(weight, form))
        assert packed is not None
        self.form, self.packed, self.table = form, packed, table_words(packed, dtype)
        self.x = torch.randn(rows, product.inputs, device=device, dtype=dtype)
        self.gain = torch.rand(product.inputs, device=device, dtype=dtype) + 0.5 if product.norm else None
        self.old = torch.randn(rows, product.outputs, device=device, dtype=dtype)
        self.scratch = SplitScratch([(product.outputs, SkinnyTiling(64, 0, 0, split=64))], device)
        self.fp8_scratch = Fp8Scratch([], 0, device)
        self.bytes = packed.numbers.nbytes + packed.scale.nbytes
        self.floor_us = self.bytes / READ_BYTES_PER_S * 1e6
        copies = max(4, -(-_ROTATION_BYTES // self.bytes)) if on_gpu else 1
        self.copies = [replace(packed, numbers=packed.numbers.clone()) for _ in range(copies)]
        normed = rms_norm(self.x, (product.inputs,), self.gain, _EPS) if self.gain is not None else self.x
        self.normed = normed
        y = linear(normed.float(), packed.unpacked(torch.float32))
        if product.glu:
            gate, up = y.chunk(2, dim=-1)
            y = silu(gate) * up
        self.expected = y + self.old.float() if product.add else y

    def new_out(self) -> torch.Tensor:
        return self.old.clone() if self.product.add else torch.full_like(self.old, torch.nan)

    def error(self, way: Way) -> float:
        out = self.new_out()
        way.run(self.packed, out)
        return float((out.float() - self.expected).abs().max() / self.expected.abs().max())

    def median_us(self, run: Run) -> float:
        """Microseconds of one launch, in a graph that takes all weights in turn."""
        out = self.new_out()
        if out.device.type != "cuda":
            return float("nan")  # results can be tried on a CPU, times cannot
        turns = len(self.copies) * -(-_MIN_LAUNCHES // len(self.copies))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(turns):
                run(self.copies[turn % len(self.copies)], out)
        return median_ms(graph.replay, _REPEATS) / turns * 1e3

    # -- the ways

    def one(self, tilings: list[QuantizedTiling]) -> Iterator[Way]:
        rule = quantized_gemv_tiling(self.packed, glu=self.product.glu)
        run = partial(self._gemv)
        yield Way(_text(rule), partial(run, tiling=rule), chosen=True)
        for tiling in tilings:
            if tiling != rule and _fits_registers(tiling, self.packed, glu=self.product.glu):
                yield Way(_text(tiling), partial(run, tiling=tiling))

    def pairs(self, tilings: list[PairTiling]) -> Iterator[Way]:
        """One row of 16-bit inputs, two numbers at a time."""
        if not suits(self.packed):
            return
        rule = pair_gemv_tiling(self.packed, glu=self.product.glu)
        for tiling in [rule, *(t for t in tilings if t != rule)]:
            if _pairs_fit(tiling, self.packed, glu=self.product.glu) or tiling == rule:
                yield Way(_text(tiling), partial(self._pairs, tiling=tiling), chosen=tiling == rule)

    def few(self, tilings: list[DotTiling]) -> Iterator[Way]:
        rule = dot_tiling(self.packed, self.rows, glu=self.product.glu, norm=self._norms)
        yield Way(_text(rule), partial(self._dot, tiling=rule), chosen=True)
        for tiling in tilings:
            fits = tiling.split <= self.packed.num_blocks and (
                tiling.split == 1 or not (self.product.glu or self._norms)
            )
            if tiling != rule and fits and (self.rows <= tiling.block_m or self.rows > 16):
                yield Way(_text(tiling), partial(self._dot, tiling=tiling))

    @property
    def _norms(self) -> bool:
        """Whether the norm rides along: of one row."""
        return self.rows == 1 and self.gain is not None

    def rounded(self, tilings: list[Fp8Tiling]) -> Iterator[Way]:
        """e4m3 times e4m3; gated products leave their activation to another kernel, which is not counted."""
        width = self.packed.num_blocks * 128
        rule = fp8_tiling(self.product.weight_rows, width, self.rows)
        self.fp8_scratch.parts = torch.zeros(2**23, device=self.x.device)
        self.fp8_scratch.arrived = torch.zeros(4096, dtype=torch.int32, device=self.x.device)
        rows = torch.empty(self.rows, width, dtype=torch.float8_e4m3fn, device=self.x.device)
        scale = torch.empty(self.rows, dtype=torch.float32, device=self.x.device)
        fp8_rows(self.x, rows, scale, gain=self.gain, eps=_EPS)
        yield Way("rows to e4m3 alone", lambda packed, out: fp8_rows(self.x, rows, scale, gain=self.gain, eps=_EPS),
                  precision="none", always=True)  # fmt: skip
        for tiling in [rule, *(t for t in tilings if t != rule)]:
            run = partial(self._fp8, rows, scale, tiling)
            yield Way(_text(tiling), run, chosen=tiling == rule, precision="rounded")
        if self.x.is_cuda:
            yield Way("torch._scaled_mm", partial(self._scaled_mm, rows, scale), precision="rounded", always=True)

    def unpacked(self) -> Iterator[Way]:
        room = self.x.new_empty(min(2**24, self.packed.shape.numel()))

        def run(packed: Packed, out: torch.Tensor) -> None:
            outputs, inputs = packed.shape
            both = out if not self.product.glu else out.new_empty(self.rows, outputs)
            most = room.numel() // inputs
            for first in range(0, outputs, most):
                some = slice(first, min(first + most, outputs))
                columns = unpack(packed, room, some, self.table).t()
                part = both[:, some]
                part.addmm_(self.normed, columns) if self.product.add else torch.mm(self.normed, columns, out=part)
            if self.product.glu:
                gate, up = both.chunk(2, dim=-1)
                torch.mul(silu(gate), up, out=out)

        yield Way("unpacked, cuBLAS", run, always=True)

    def _gemv(self, packed: Packed, out: torch.Tensor, *, tiling: QuantizedTiling) -> None:
        quantized_gemv(self.x, packed, out, table=self.table, gain=self.gain, eps=_EPS, add=self.product.add,
                       glu=int(self.product.glu), tiling=tiling)  # fmt: skip

    def _pairs(self, packed: Packed, out: torch.Tensor, *, tiling: PairTiling) -> None:
        pair_gemv(self.x, packed, out, gain=self.gain, eps=_EPS, add=self.product.add, glu=int(self.product.glu),
                  tiling=tiling)  # fmt: skip

    def _dot(self, packed: Packed, out: torch.Tensor, *, tiling: DotTiling) -> None:
        x, gain = (self.x, self.gain) if self._norms else (self.normed, None)
        quantized_dot(x, packed, out, table=self.table, gain=gain, eps=_EPS, add=self.product.add, glu=int(self.product.glu),
                      tiling=tiling, scratch=self.scratch)  # fmt: skip

    def _wide(self, out: torch.Tensor) -> torch.Tensor:
        """Where gate and up go."""
        return out if not self.product.glu else out.new_empty(self.rows, self.product.weight_rows)

    def _gated(self, wide: torch.Tensor, out: torch.Tensor) -> None:
        if self.product.glu and not torch.cuda.is_current_stream_capturing():  # for the check; not timed
            gate, up = wide.chunk(2, dim=-1)
            torch.mul(silu(gate), up, out=out)

    def _fp8(
        self, rows: torch.Tensor, scale: torch.Tensor, tiling: Fp8Tiling, packed: Packed, out: torch.Tensor
    ) -> None:
        wide = self._wide(out)
        fp8_product(rows, scale, packed, wide, add=self.product.add, tiling=tiling, scratch=self.fp8_scratch)
        self._gated(wide, out)

    def _scaled_mm(self, rows: torch.Tensor, scale: torch.Tensor, packed: Packed, out: torch.Tensor) -> None:
        weight = packed.numbers.view(torch.float8_e4m3fn).t()
        y = torch._scaled_mm(rows, weight, scale[:, None], packed.scale.float().t(), out_dtype=torch.bfloat16,
                             use_fast_accum=True)  # fmt: skip
        if self.product.add:
            out.add_(y)
        elif not self.product.glu:
            out.copy_(y)
        self._gated(y, out)


def _text(tiling: Any) -> str:
    match tiling:
        case QuantizedTiling():
            return f"{tiling.block_n} x {tiling.blocks} blocks, {tiling.warps} warps, {tiling.ahead} ahead"
        case PairTiling():
            return f"pairs {tiling.block_n}, {tiling.warps} warps, {tiling.times} times, {tiling.ahead} ahead"
        case DotTiling():
            shape = f"{tiling.block_n} x {tiling.block_m}, {tiling.stages} stages, split {tiling.split}"
            return f"{shape}, {tiling.warps} warps, {tiling.fetch} fetched"
        case _:
            shape = f"fp8 {tiling.block_n} x {tiling.block_m} x {tiling.block_k}, {tiling.stages} stages"
            return f"{shape}, {tiling.warps} warps, split {tiling.split}, {tiling.fetch} fetched"


def _fits_registers(tiling: QuantizedTiling, packed: Packed, *, glu: bool) -> bool:
    turns = -(-packed.num_blocks // tiling.blocks)
    ahead = tiling.ahead * tiling.block_n * (2 if glu else 1) * tiling.blocks / tiling.warps  # words of a thread
    return tiling.ahead <= turns <= 16 and ahead <= 128


def _pairs_fit(tiling: PairTiling, packed: Packed, *, glu: bool) -> bool:
    """Whether no more than an eighth of a turn's threads is idle, a third where there is one turn; and registers suffice."""
    turns = -(-packed.num_blocks // (4 * tiling.warps))
    idle = 1 - packed.num_blocks / (4 * tiling.warps * turns)
    outputs = tiling.block_n * (2 if glu else 1) * min(tiling.times, tiling.ahead + 1)
    words = turns * outputs * (4 if packed.group == 0 else 6)
    inputs = turns * (2 * packed.places + packed.places // 2)
    return idle <= (1 / 3 if turns == 1 else 1 / 8) and words >= 16 and words + inputs <= 216


ONE = [
    QuantizedTiling(outputs, blocks, warps, ahead)
    for outputs in (2, 4, 8)
    for blocks, warps in ((4, 1), (8, 2), (16, 4))
    for ahead in (1, 2)
]
IN_PAIRS = [
    PairTiling(outputs, warps, times, ahead)
    for outputs in (1, 2, 4, 8)
    for warps in (1, 2, 4, 8)
    for times, ahead in ((1, 1), (2, 1), (4, 1), (4, 2))
]
FEW = [
    DotTiling(outputs, rows, 5, split, warps, fetch)
    for outputs, warps, rows in ((64, 4, 16), (64, 4, 8), (16, 1, 8), (32, 2, 8))
    for split in (1, 2, 4)
    for fetch in (0, 32)
]
MANY = [DotTiling(64, 64, 3), DotTiling(128, 64, 3), DotTiling(64, 128, 3), DotTiling(128, 128, 3, warps=8),
        DotTiling(128, 128, 4, warps=8), DotTiling(128, 256, 3, warps=8), DotTiling(64, 128, 4),
        DotTiling(64, 32, 4)]  # fmt: skip
ROUNDED = [
    Fp8Tiling(outputs, rows, stages, warps, split=split, fetch=fetch)
    for outputs, rows, warps, stages in (
        (128, 64, 4, 6),
        (64, 64, 4, 6),
        (64, 128, 4, 6),
        (128, 128, 8, 5),
        (128, 128, 4, 3),
    )
    for split in (1, 2, 3, 4)
    for fetch in (0, 4)
]


def ways_of(case: Case, part: str) -> list[Way]:
    if part == "one":
        return [*case.one(ONE), *case.pairs(IN_PAIRS)]
    if part == "pairs":
        return [Way(way.name, way.run, always=True) for way in case.one([])] + list(case.pairs(IN_PAIRS))
    if part == "few":
        return list(case.few(FEW))
    ways = list(case.rounded(ROUNDED)) if case.form == "fp8" else list(case.few(MANY))
    return ways if case.form == "fp8" else [*ways, *case.unpacked()]


def measure(case: Case, ways: list[Way], most: int) -> None:
    """Prints the fastest, and the rule's. A kernel that cannot be compiled or launched, or is off, is named."""
    times: list[tuple[float, Way, float]] = []
    for way in ways:
        try:
            error = case.error(way) if way.precision in MAX_ERROR else 0.0
            if not error < MAX_ERROR.get(way.precision, 1.0):
                print(f"  OFF by {error:.2g}: {case.form} {case.product.name} {case.rows} rows, {way.name}", flush=True)
                continue
            times.append((case.median_us(way.run), way, error))
        except Exception as error:
            print(f"  FAILED {case.form} {case.product.name}, {way.name}: {str(error)[:120]!r}", flush=True)
    times.sort(key=lambda timed: timed[0])
    for rank, (us, way, off) in enumerate(times):
        if rank < most or way.chosen or way.always:
            figures = f"{case.form} | {case.product.name} | {case.rows} | {us:.2f} | {case.floor_us / us:.0%}"
            print(f"| {figures} | {way.name} | {off:.1e} | {'rule' if way.chosen else ''} |", flush=True)


def cublas_line(product: Product, rows: int, device: torch.device) -> None:
    """The same product with 16-bit weights."""
    if device.type != "cuda":
        return
    x = torch.randn(rows, product.inputs, device=device, dtype=torch.bfloat16)
    weights = torch.randn(8, product.weight_rows, product.inputs, device=device, dtype=torch.bfloat16)
    out = x.new_empty(rows, product.weight_rows)
    torch.mm(x, weights[0].t(), out=out)  # cuBLAS cannot be set up while a graph is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(24):
            torch.mm(x, weights[turn % 8].t(), out=out)
    us = median_ms(graph.replay, _REPEATS) / 24 * 1e3
    print(f"| bf16 | {product.name} | {rows} | {us:.2f} | | cuBLAS | | |", flush=True)


def _products(model: str) -> list[Product]:
    shape = SHAPES[model]
    return [*products_of(model), Product(model, "head", shape["vocab_size"], shape["hidden_size"], norm=True)]


def products(part: str, options: argparse.Namespace, device: torch.device) -> None:
    print("| form | product | rows | µs | of floor | way | off by | |\n" + "|---" * 8 + "|")
    rows_of = {"one": [1], "pairs": [1], "few": options.few, "many": options.many}
    for form in options.forms:
        for product in [p for p in _products(options.model) if p.name in options.products]:
            if form == "bf16":
                if part == "many":
                    for rows in rows_of[part]:
                        cublas_line(product, rows, device)
                continue
            cases = [Case(product, form, rows, device) for rows in rows_of[part]]
            if device.type == "cuda":
                with compiling_only():  # kernels do not depend on the number of rows, but for one row's norm
                    for case in cases[:2]:
                        for way in ways_of(case, part):
                            if way.name not in ("torch._scaled_mm", "unpacked, cuBLAS"):
                                way.run(case.packed, case.new_out())
            for case in cases:
                measure(case, ways_of(case, part), options.most)
            if time.monotonic() - STARTED > options.seconds:
                print("no time is left for the rest", flush=True)
                return


def steps(options: argparse.Namespace) -> None:
    """Milliseconds of whole steps, form by form; `int4:gemv`, `int4:dot` and `int4:pairs` name the way of one row, and do one row
    alone."""
    rule, in_pairs = quantized_matrix.ON_TENSOR_CORES, quantized_matrix.IN_PAIRS
    for name in options.forms:
        form, _, one_row = name.partition(":")
        every = frozenset({"fp8", "int8", "int4", "table"})
        none: frozenset[str] = frozenset()
        quantized_matrix.ON_TENSOR_CORES = {"": rule, "dot": every}.get(one_row, none)
        quantized_matrix.IN_PAIRS = {"": in_pairs, "pairs": every}.get(one_row, none)
        few = None if form == "bf16" else partial(quantize, form=form)
        counts, prompts = ([1], []) if one_row else (options.rows, options.prompts)
        tokens = max([512, options.context + 1, *prompts])
        runner = machine(options.model, max(counts) + 1, tokens, quantize=few, lm_head=options.lm_head)
        for rows in counts:
            plan = plan_of(rows, options.context)
            if fits(runner, plan):
                work = step_work(runner, plan)
                ms = median_ms(work)
                print(
                    f"| {name} | decode {rows} x {options.context} | {ms:.3f} ms | {rows / ms * 1e3:,.0f} tok/s |",
                    flush=True,
                )
                if rows in options.profile:
                    for kernel, part, launches in kernel_shares(work)[:8]:
                        print(f"      {part:7.3f} ms {launches:4d} x {kernel[:60]}", flush=True)
        for prompt in prompts:
            ms = median_ms(step_work(runner, plan_of(0, 0, prompt)), 10)
            print(f"| {name} | prompt {prompt} | {ms:.3f} ms | |", flush=True)
        del runner
        torch.cuda.empty_cache()
    quantized_matrix.ON_TENSOR_CORES, quantized_matrix.IN_PAIRS = rule, in_pairs


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("parts", nargs="+", choices=["one", "pairs", "few", "many", "steps"])
    parser.add_argument("--model", choices=SHAPES, default="llama-3.2-3b")
    parser.add_argument("--forms", nargs="+", default=["fp8", "int4"], help=f"bf16, {', '.join(FORMS)}")
    parser.add_argument("--products", nargs="+", default=["qkv", "o", "gate_up", "down"])
    parser.add_argument("--few", nargs="+", type=int, default=[1, 2, 16])
    parser.add_argument("--many", nargs="+", type=int, default=[32, 100, 256, 1024])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 100, 256], help="of whole steps")
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--lm-head", action=argparse.BooleanOptionalAction, default=True, help="in few bits, too")
    parser.add_argument(
        "--profile", nargs="+", type=int, default=[], help="whole steps of so many rows, kernel by kernel"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further product after so many")
    parser.add_argument("--most", type=int, default=3, help="lines of each product")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for part in options.parts:
        if part == "steps":
            steps(options)
        else:
            products(part, options, device)


if __name__ == "__main__":
    main()
