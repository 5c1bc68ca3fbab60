"""The kernels of a mixture of experts on one GPU, in several tilings, against the time that reading the chosen experts takes.

    python -m benchmarks.gpu_experts --json experts.json
    python -m benchmarks.gpu_experts --rows 1,100 --best 6        # more of the tilings that were tried
    python -m benchmarks.gpu_experts --form int8 --rows 1,16,100  # experts in few bits, in the tilings of the rule

Does: for each number of rows, the products of chosen experts in every tiling of a list (microseconds, share of the floor), the
kernels between them, and a whole layer's mixer as the model runs it. Times are of CUDA graphs that walk through several layers
of weights, more than L2 holds. The floor is the bytes of the experts that some row chose, or their arithmetic where that takes
longer. Every result is compared with float32 beforehand; one that is off ends the benchmark. Does not: need weights, or attend.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, silu

from benchmarks.gpu_step import median_ms
from benchmarks.workload import READ_BYTES_PER_S, SHAPES
from tonle.models.cuda import experts_grouped, experts_one_row
from tonle.models.cuda.experts import CudaExperts, ExpertScratch, Room
from tonle.models.cuda.experts_grouped import GroupedTiling, add_up, grouped_down, grouped_gate_up, grouped_tiling
from tonle.models.cuda.experts_one_row import (
    OneRowTiling,
    down_tiling,
    gate_up_tiling,
    one_row_down,
    one_row_gate_up,
)
from tonle.models.cuda.experts_routing import assign
from tonle.models.cuda.experts_weights import ExpertWeights
from tonle.models.cuda.few_bits import table_words
from tonle.models.cuda.launch import compiling_only
from tonle.models.cuda.matrix import Matrix, Norm
from tonle.models.layers import Quantized
from tonle.models.packed import pack
from tonle.models.spec import MixerSpec

MAX_ERROR = 1e-2  # ||out - expected|| / ||expected||: several roundings to bfloat16, 0.2 % each
FLOPS = 780e12  # bfloat16 products of an H200, measured
EPS = 1e-6
GROUP = 128  # inputs that share a scale, in integers
_REPEATS = 15
_MIN_LAUNCHES = 16  # per graph
ONE_ROW = {
    "gate_up": [OneRowTiling(n, k, w) for n, k, w in (
        (1, 1024, 1), (1, 2048, 1), (2, 256, 1), (2, 512, 1), (2, 1024, 1), (4, 256, 1), (4, 512, 1), (4, 512, 2), (8, 256, 1))],
    "down": [OneRowTiling(n, k, w, ahead=a) for n, k, w, a in (
        (1, 256, 1, 24), (2, 256, 1, 6), (2, 256, 1, 9), (2, 256, 1, 12), (2, 256, 1, 18), (2, 256, 1, 24), (4, 256, 1, 6),
        (4, 256, 1, 12))],
}  # fmt: skip
FEW = [(32, 16, 128, 4, 4), (32, 16, 128, 5, 4), (64, 16, 64, 6, 4), (64, 16, 128, 3, 4), (64, 16, 128, 4, 4)]
SOME = [(32, 32, 64, 6, 4), (64, 32, 64, 5, 4), (64, 32, 64, 6, 4), (64, 32, 128, 3, 4), (64, 64, 64, 4, 4)]
MANY = [(64, 64, 64, 4, 4), (64, 128, 64, 3, 4), (64, 128, 64, 4, 8), (128, 64, 64, 4, 8), (128, 128, 64, 3, 8),
        (128, 128, 64, 4, 8), (64, 256, 64, 3, 8)]  # fmt: skip


def grouped_candidates(mean: float, *, glu: bool) -> list[GroupedTiling]:
    """For so many pairs per expert. Products that are not gated read half as many rows of W: blocks are twice as high."""
    found = FEW if mean < 4 else FEW + SOME if mean < 12 else SOME if mean < 40 else MANY
    return [GroupedTiling(n if glu else 2 * n, m, k, stages=s, warps=w) for n, m, k, s, w in found]


class Layers:
    """Random experts of several layers, each with buffers of its own."""

    def __init__(
        self, mixer: MixerSpec, hidden: int, count: int, tokens: int, device: torch.device, form: str = "bf16"
    ) -> None:
        self.mixer, self.hidden, self.device, self.form = mixer, hidden, device, form
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # triton's interpreter has no bfloat16
        self.all = [self._layer() for _ in range(count)]
        for layer in self.all:
            layer.scratch = ExpertScratch([layer], tokens)
        self.norm = Norm(self._random(hidden), EPS, self._random(tokens, hidden))

    def _random(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(std=std)

    def _layer(self) -> CudaExperts:
        experts, size, hidden = self.mixer.num_experts, self.mixer.size, self.hidden
        router = self._random(experts, hidden, std=hidden**-0.5)
        gate_up, down = self._weights(experts, 2 * size, hidden), self._weights(experts, hidden, size)
        return CudaExperts(self.mixer, Matrix(router, router.t(), None), gate_up, down)

    def _weights(self, experts: int, outputs: int, inputs: int) -> ExpertWeights:
        if self.form == "bf16":
            return ExpertWeights(self._random(experts, outputs, inputs, std=inputs**-0.5))
        rows, groups = experts * outputs, 1 if self.form == "fp8" else inputs // GROUP
        scale = torch.rand(rows, groups, device=self.device).add_(0.5).mul_(inputs**-0.5)
        if self.form == "fp8":
            numbers = torch.randn(rows, inputs, device=self.device, dtype=self.dtype).to(torch.float8_e4m3fn)
            stored = Quantized(numbers, scale)
        elif self.form == "int8":
            numbers = torch.randint(-127, 128, (rows, inputs), device=self.device, dtype=torch.int8)
            stored = Quantized(numbers, scale / 73)  # so that a weight's spread is that of the others
        else:
            numbers = torch.randint(0, 16, (rows, inputs), device=self.device, dtype=torch.uint8)
            stored = Quantized(numbers, scale / 4.6, scale * (-7.5 / 4.6), bits=4)
        packed = pack(stored)
        assert packed is not None
        return ExpertWeights(packed.numbers.view(experts, outputs, -1), None, packed, table_words(packed, self.dtype))

    def room(self, layer: CudaExperts, rows: int) -> Room:
        assert layer.scratch is not None
        return layer.scratch.room(layer, rows)


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.gain.float()


def dense(weights: ExpertWeights, expert: int) -> torch.Tensor:
    """(out, in) float32"""
    packed = weights.packed
    if packed is None:
        return weights.weight[expert].float()
    outputs = weights.weight.shape[1]
    rows = slice(expert * outputs, (expert + 1) * outputs)
    minimum = None if packed.minimum is None else packed.minimum[rows]
    return replace(packed, numbers=packed.numbers[rows], scale=packed.scale[rows], minimum=minimum).unpacked(
        torch.float32
    )


def expected(layer: CudaExperts, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """What the experts give x (T, hidden), by the logits of ours: float32."""
    mixer = layer.spec
    shares, chosen = logits[:, : mixer.num_experts].float().softmax(-1).topk(mixer.experts_per_token)
    if mixer.normed_shares:
        shares /= shares.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for index in chosen.unique().tolist():
        token, place = (chosen == index).nonzero(as_tuple=True)
        gate, up = linear(x[token], dense(layer.gate_up, index)).chunk(2, dim=-1)
        given = linear(silu(gate) * up, dense(layer.down, index))
        out.index_add_(0, token, given * shares[token, place, None])
    return out


class Case:
    """One number of rows."""

    def __init__(self, layers: Layers, rows: int) -> None:
        self.layers, self.rows, self.mixer = layers, rows, layers.mixer
        self.x = layers._random(rows, layers.hidden)
        self.live = torch.full((1,), rows, dtype=torch.int32, device=layers.device)
        self.normed = layers.norm.buffer[:rows]
        self.out = layers._random(rows, layers.hidden)
        self.pairs = rows * self.mixer.experts_per_token

    def whole(self, layer: CudaExperts) -> None:
        layer.mix(self.x, self.layers.norm, self.live)
        layer.add(self.out, self.live, settled=True)

    def check(self) -> None:
        """Every layer, which leaves logits, lists and activations in its buffers, for products to be timed alone."""
        for layer in self.layers.all:
            before = self.out.normal_(std=0.02).clone()  # small: what rounding takes off the sum is small, too
            self.whole(layer)
            logits = self.layers.room(layer, self.rows).logits
            self.compare(self.out - before, expected(layer, normed(self.x, self.layers.norm), logits), "the mixer")

    def compare(self, found: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
        error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
        if not error < MAX_ERROR:
            raise SystemExit(f"{what} is off by {error:.2g} with {self.rows} rows")

    def floors(self) -> tuple[float, float, int]:
        """Microseconds of gate and up, and of down; experts that were chosen, on average."""
        chosen = 0
        for layer in self.layers.all:
            logits = self.layers.room(layer, self.rows).logits[:, : self.mixer.num_experts]
            chosen += len(logits.topk(self.mixer.experts_per_token).indices.unique())
        weight_bytes = {"bf16": 2.0, "int4": 0.5 + 8 / GROUP, "int8": 1.0 + 4 / GROUP, "fp8": 1.0}[self.layers.form]
        read = chosen / len(self.layers.all) * self.mixer.size * self.layers.hidden * weight_bytes / READ_BYTES_PER_S
        computed = 2 * self.pairs * self.mixer.size * self.layers.hidden / FLOPS
        return 2e6 * max(read, computed), 1e6 * max(read, computed), round(chosen / len(self.layers.all))

    def gate_up(self, layer: CudaExperts, tiling: Any) -> torch.Tensor:
        room = self.layers.room(layer, self.rows)
        if self.rows == 1:
            one_row_gate_up(self.x, room.logits, layer.gate_up, self.mixer, room.active, gain=self.layers.norm.gain,
                            eps=EPS, tiling=tiling)  # fmt: skip
        else:
            grouped_gate_up(self.normed, layer.gate_up, room.routed, self.mixer, room.active, tiling)
        return room.active

    def down(self, layer: CudaExperts, tiling: Any) -> torch.Tensor:
        room = self.layers.room(layer, self.rows)
        if self.rows == 1:
            one_row_down(room.active, room.logits, layer.down, None, self.mixer, self.out, add=False, tiling=tiling)
            return self.out
        grouped_down(room.active, layer.down, room.routed, room.given, tiling)
        return room.given

    def between(self) -> dict[str, Callable[[CudaExperts], object]]:
        """The small kernels."""

        def routed(layer: CudaExperts) -> None:
            room = self.layers.room(layer, self.rows)
            top, norm_shares = self.mixer.experts_per_token, self.mixer.normed_shares
            assign(room.logits, self.live, *room.routed, top=top, normed=norm_shares)

        def added(layer: CudaExperts) -> None:
            room = self.layers.room(layer, self.rows)
            add_up(room.given, room.routed, None, room.logits, self.live, self.mixer, self.out, add=True)

        def router(layer: CudaExperts) -> None:
            layer.router.apply(self.x, self.layers.norm, self.layers.room(layer, self.rows).logits)

        return {"norm and router": router} if self.rows == 1 and self.layers.form == "bf16" else {
            "norm and router": router, "assign": routed, "add up": added}  # fmt: skip

    def candidates(self, product: str) -> list[Any]:
        """The tiling of the rule first."""
        mixer, hidden = self.mixer, self.layers.hidden
        if self.rows == 1:
            chosen: Any = gate_up_tiling(mixer.size, hidden) if product == "gate_up" else down_tiling(
                hidden, mixer.size, mixer.experts_per_token)  # fmt: skip
            return list(dict.fromkeys([chosen, *ONE_ROW[product]]))
        glu = product == "gate_up"
        chosen = grouped_tiling(self.pairs, mixer.num_experts, glu=glu)
        return list(dict.fromkeys([chosen, *grouped_candidates(self.pairs / mixer.num_experts, glu=glu)]))

    def median_us(self, work: Callable[[CudaExperts], object]) -> float:
        """Of one layer, in a graph that takes all of them in turn."""
        work(self.layers.all[0])  # compiled and loaded
        if self.layers.device.type != "cuda":
            return float("nan")  # results can be tried on a CPU, times cannot
        turns = -(-_MIN_LAUNCHES // len(self.layers.all))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(turns):
                for layer in self.layers.all:
                    work(layer)
        return median_ms(graph.replay, _REPEATS) / turns / len(self.layers.all) * 1e3


def text_of(tiling: Any) -> str:
    if isinstance(tiling, OneRowTiling):
        return f"{tiling.block_n} x {tiling.block_k}, {tiling.warps} warps, {tiling.ahead} ahead"
    return f"{tiling.block_n} x {tiling.block_m} x {tiling.block_k}, {tiling.stages} stages, {tiling.warps} warps"


def tried(case: Case, product: str) -> list[tuple[float, Any]]:
    """Microseconds of each tiling that the device has room for; the first is that of the rule."""
    run: Callable[[CudaExperts, Any], torch.Tensor] = getattr(case, product)
    layer, found = case.layers.all[0], []
    wanted = run(layer, None).clone()
    for tiling in case.candidates(product):
        try:
            got = run(layer, tiling)
        except Exception as error:  # too much shared memory, or too many registers
            if "out of resource" not in str(error):
                raise
            continue
        got.fill_(torch.nan)
        case.compare(run(layer, tiling), wanted, f"{product} with {tiling}")
        found.append((case.median_us(lambda one, cut=tiling: run(one, cut)), tiling))  # type: ignore[misc]
    run(layer, None)
    return found


@contextmanager
def tilings(rows: int, gate_up: Any, down: Any) -> Iterator[None]:
    """Products are cut like this."""
    if rows == 1:
        names, rules = ("gate_up_tiling", "down_tiling"), (lambda *_: gate_up, lambda *_: down)
        module: Any = experts_one_row
    else:
        names, rules = ("grouped_tiling",), (lambda *_, glu: gate_up if glu else down,)
        module = experts_grouped
    before = [getattr(module, name) for name in names]
    for name, rule in zip(names, rules, strict=True):
        setattr(module, name, rule)
    try:
        yield
    finally:
        for name, rule in zip(names, before, strict=True):
            setattr(module, name, rule)


def wholes(case: Case, gate_up: Any, down: Any) -> dict[str, Callable[[CudaExperts], object]]:
    """The whole mixer as the rule has it, and with the tilings that were best alone."""

    def best(layer: CudaExperts) -> None:
        with tilings(case.rows, gate_up, down):
            case.whole(layer)

    return {"whole mixer": case.whole, "whole mixer, best": best}


def measure(case: Case, best: int) -> list[dict[str, Any]]:
    """The lines of one number of rows, printed."""
    case.check()
    gate_up_floor, down_floor, chosen = case.floors()
    lines: list[dict[str, Any]] = []
    fastest = []
    products = (("gate_up", gate_up_floor), ("down", down_floor)) if case.layers.form == "bf16" else ()
    for product, floor in products:
        found = tried(case, product)
        shown = [found[0], *sorted(found, key=lambda pair: pair[0])[:best]]
        fastest.append(shown[1][1])
        for place, (us, tiling) in enumerate(shown):
            name = f"{product}, {'chosen' if place == 0 else place}"
            print(
                f"| {case.rows} | {name} | {us:.2f} | {floor:.2f} | {floor / us:.0%} | {text_of(tiling)} |", flush=True
            )
        lines += [{"rows": case.rows, "product": product, "us": us, "floor_us": floor, "tiling": text_of(tiling)}
                  for us, tiling in found]  # fmt: skip
    whole = wholes(case, *fastest) if products else {"whole mixer": case.whole}
    for name, work in (case.between() | whole).items():
        us, floor = case.median_us(work), (gate_up_floor + down_floor if name.startswith("whole") else 0.0)
        share = f"{floor / us:.0%}" if floor else "–"
        print(f"| {case.rows} | {name} | {us:.2f} | {floor:.2f} | {share} | {chosen} experts |", flush=True)
        lines.append({"rows": case.rows, "product": name, "us": us, "floor_us": floor, "chosen": chosen})
    return lines


def compile_all(cases: list[Case]) -> None:
    """Side by side, before anything is timed."""
    with compiling_only():
        for case in cases:
            for tiling in case.candidates("gate_up"):
                case.gate_up(case.layers.all[0], tiling)
            for tiling in case.candidates("down"):
                case.down(case.layers.all[0], tiling)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    shapes = [name for name, shape in SHAPES.items() if "num_experts" in shape]
    parser.add_argument("--model", choices=shapes, default=shapes[0])
    parser.add_argument("--rows", default="1,2,8,32,100,256,1024,4096")
    parser.add_argument(
        "--form", choices=["bf16", "fp8", "int8", "int4"], default="bf16", help="of the experts' weights"
    )
    parser.add_argument("--layers", type=int, default=4, help="of weights that graphs walk through")
    parser.add_argument("--best", type=int, default=3, help="tilings to print of each product, fastest first")
    parser.add_argument("--json", type=Path, help="save all lines here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, rows = SHAPES[options.model], [int(count) for count in options.rows.split(",")]
    mixer = MixerSpec(
        kind="experts", size=shape["moe_intermediate_size"], num_experts=shape["num_experts"],
        experts_per_token=shape["num_experts_per_tok"], normed_shares=shape["norm_topk_prob"],
    )  # fmt: skip
    torch.manual_seed(0)
    layers = Layers(mixer, shape["hidden_size"], options.layers, max(rows), device, options.form)
    cases = [Case(layers, count) for count in rows]
    if device.type == "cuda" and options.form == "bf16":
        compile_all(cases)
    print("| rows | kernel | µs | floor µs | of floor | |\n" + "|---" * 6 + "|")
    lines = [line for case in cases for line in measure(case, options.best)]
    if options.json:
        options.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
