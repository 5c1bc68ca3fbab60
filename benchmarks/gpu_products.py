"""Products of decode steps with 2 to 256 rows: cuBLAS against every cut of ours worth trying, on one GPU.

    python -m benchmarks.gpu_products --json products.json --cuts cuts.txt

Prints one line per model, product and number of rows: microseconds of both, the best cut, and its share of the memory floor.
First all cuts are compiled and checked in other processes (`gpu_rehearsal.py`), then those that are right are timed: graphs of
launches that walk through more copies of the weights than L2 holds. cuBLAS means all that one launch of ours replaces: the
product with bias or residual, and for gate and up the activation, too. A second table has all products of a layer in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cuts import Product, cuts_to_try
from benchmarks.gpu_rehearsal import MAX_ERROR, Rehearsal, Scene, Weights, rehearse
from benchmarks.workload import SHAPES
from tonle.models.cuda.skinny_cuts import Cut

READ_BYTES_PER_S = 4.43e12  # measured on an H200
_ROTATION_BYTES = 200e6  # of weights: more than three times L2
_MIN_LAUNCHES = 24  # per graph, so that its own start does not count
_REPEATS = 15
_LAYERS = 12  # per graph
_LAYER_COPIES = 3

Launch = Callable[[torch.Tensor, torch.Tensor], None]  # weight, out


@dataclasses.dataclass(slots=True)
class Line:
    """One line of the table. Times in microseconds; a cut has a time or a problem."""

    product: Product
    rows: int
    cublas_us: float | None = None
    problem: str | None = None
    ours_us: dict[Cut, float] = dataclasses.field(default_factory=dict)
    errors: dict[Cut, float] = dataclasses.field(default_factory=dict)
    problems: dict[Cut, str] = dataclasses.field(default_factory=dict)

    @property
    def winner(self) -> Cut | None:
        """The best cut if it is faster than cuBLAS."""
        best = self.best
        return best if best is not None and self.ours_us[best] < (self.cublas_us or float("inf")) else None

    @property
    def best(self) -> Cut | None:
        return min(self.ours_us, key=lambda cut: self.ours_us[cut], default=None)

    @property
    def floor_us(self) -> float:
        return self.product.num_bytes(self.rows) / READ_BYTES_PER_S * 1e6

    def as_json(self) -> dict[str, Any]:
        cuts = [
            dataclasses.asdict(cut)
            | {"us": self.ours_us.get(cut), "error": self.errors.get(cut), "problem": self.problems.get(cut)}
            for cut in (*self.ours_us, *self.problems)
        ]
        return {
            "model": self.product.model, "product": self.product.name, "rows": self.rows, "floor_us": self.floor_us,
            "cublas_us": self.cublas_us, "problem": self.problem, "cuts": cuts,
        }  # fmt: skip


def products_of(model: str) -> list[Product]:
    shape = SHAPES[model]
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    head_dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
    q, kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    return [
        Product(model, "qkv", q + 2 * kv, hidden, bias=shape["model_type"] == "qwen2"),
        Product(model, "o", hidden, q, add=True),
        Product(model, "gate_up", wide, hidden, glu=True),
        Product(model, "down", hidden, wide, add=True),
    ]


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream()


def median_us(turn: Callable[[int], None], turns: int, device: torch.device) -> float:
    """Microseconds of one turn, in a graph of many."""
    if device.type != "cuda":  # to try the benchmark itself; says nothing
        begin_s = time.perf_counter()
        turn(0)
        return (time.perf_counter() - begin_s) * 1e6
    side = _side_stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        turn(0)
        side.synchronize()
        graph.capture_begin()
        try:
            for index in range(turns):
                turn(index)
        finally:
            graph.capture_end()
        for _ in range(2):
            graph.replay()
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_REPEATS)]
        for begin, end in marks:
            begin.record()
            graph.replay()
            end.record()
        side.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in marks)
    return times[len(times) // 2] / turns * 1e3


def product_us(launch: Launch, scene: Scene) -> float:
    """One product, over all copies of its weights in turn."""
    weights, out = scene.weights.copies, scene.out.zero_()
    turns = len(weights) * max(1, -(-_MIN_LAUNCHES // len(weights)))
    return median_us(lambda index: launch(weights[index % len(weights)], out), turns, out.device)


def layer_us(steps: Sequence[tuple[Launch, Scene]]) -> float:
    """All products of a layer, one after another: each has other neighbours than itself."""

    def turn(index: int) -> None:
        for launch, scene in steps:
            launch(scene.weights.copies[index % len(scene.weights.copies)], scene.out)

    return median_us(turn, _LAYERS, steps[0][1].out.device)


def measure(line: Line, weights: Weights, cuts: Iterable[Cut], late: Callable[[], bool]) -> None:
    """Fill in one line, until it is too late."""
    scene = Scene(weights, line.rows)
    try:
        error = scene.error(scene.cublas)
        if not error < MAX_ERROR:
            line.problem = f"cuBLAS is off by {error:.2g}"
        line.cublas_us = product_us(scene.cublas, scene)
    except RuntimeError as problem:
        line.problem = f"cuBLAS: {problem}"
    for cut in cuts:
        if late():
            return
        try:
            launch = scene.ours(cut)
            error = scene.error(launch)
            if error < MAX_ERROR:
                line.ours_us[cut] = product_us(launch, scene)
                line.errors[cut] = error
            else:
                line.problems[cut] = f"off by {error:.2g} of the largest output"
        except Exception as problem:  # whatever it is, the other cuts go on
            line.problems[cut] = f"{type(problem).__name__}: {str(problem)[:200]}"


@dataclasses.dataclass(slots=True)
class LayerLine:
    """All products of a layer together: by cuBLAS, and each by its winner."""

    model: str
    rows: int
    cublas_us: float
    ours_us: float
    floor_us: float


def measure_layers(lines: Sequence[Line], device: torch.device, late: Callable[[], bool]) -> Iterable[LayerLine]:
    """One line per model and number of rows of which all products were measured."""
    for model in dict.fromkeys(line.product.model for line in lines):
        own = [line for line in lines if line.product.model == model]
        weights = {product: Weights(product, _LAYER_COPIES, device) for product in {line.product for line in own}}
        for rows in sorted({line.rows for line in own}):
            layer = [line for line in own if line.rows == rows]
            if len(layer) < len(weights) or late():
                continue
            scenes = [Scene(weights[line.product], rows) for line in layer]
            winners: list[Launch] = [
                scene.cublas if line.winner is None else scene.ours(line.winner)
                for line, scene in zip(layer, scenes, strict=True)
            ]
            theirs = layer_us([(scene.cublas, scene) for scene in scenes])
            ours = layer_us(list(zip(winners, scenes, strict=True)))
            yield LayerLine(model, rows, theirs, ours, sum(line.floor_us for line in layer))


def named(cut: Cut) -> str:
    extras = [f"split {cut.split}"] * (cut.split > 1) + [f"ahead {cut.ahead}"] * (cut.ahead > 0) + ["tma"] * cut.tma
    return " ".join([f"{cut.block_n}x{cut.block_m}x{cut.block_k} {cut.warps}w {cut.stages}s", *extras])


def print_line(line: Line) -> None:
    best = line.best
    cublas = "      –" if line.cublas_us is None else f"{line.cublas_us:7.2f}"
    ours, against, share, name = "      –", "    –", "    –", "no cut of ours ran"
    if best is not None:
        us = line.ours_us[best]
        ours, share, name = f"{us:7.2f}", f"{line.floor_us / us:5.0%}", named(best)
        against = "    –" if line.cublas_us is None else f"{line.cublas_us / us:4.2f}x"
    print(f"| {line.product.model:12} | {line.product.name:7} | {line.rows:4d} | {cublas} | {ours} | {against} | {share} "
          f"| {name} |{' ' + line.problem if line.problem else ''}", flush=True)  # fmt: skip


def table_text(lines: Sequence[Line], margin: float) -> str:
    """The body of the table in `tonle.models.cuda.skinny_cuts`: the best cut where it beats cuBLAS by `margin`."""
    text = ""
    for product in dict.fromkeys(line.product for line in lines):
        text += f"    ({product.outputs}, {product.inputs}, {product.glu}): (  # {product.model} {product.name}\n"
        for line in sorted((line for line in lines if line.product == product), key=lambda line: line.rows):
            best = line.best
            wins = best is not None and (line.cublas_us is None or line.ours_us[best] * (1 + margin) < line.cublas_us)
            text += f"        ({line.rows}, {_call(best) if best is not None and wins else None}),\n"
        text += "    ),\n"
    return text


def _call(cut: Cut) -> str:
    """A cut as it is written in Python."""
    extras = [f"split={cut.split}"] * (cut.split > 1) + [f"ahead={cut.ahead}"] * (cut.ahead > 0)
    extras += ["tma=True"] * cut.tma
    first = (cut.block_n, cut.block_m, cut.block_k)
    return f"Cut({', '.join([*map(str, first), f'warps={cut.warps}', f'stages={cut.stages}', *extras])})"


def rehearsals_of(lines: Sequence[Line]) -> list[Rehearsal]:
    """Each cut of each product once, with all its numbers of rows."""
    rows: dict[tuple[Product, Cut], list[int]] = {}
    for line in lines:
        for cut in cuts_to_try(line.product, line.rows):
            rows.setdefault((line.product, cut), []).append(line.rows)
    return [Rehearsal(product, cut, tuple(counts)) for (product, cut), counts in rows.items()]


@dataclasses.dataclass(slots=True)
class Results:
    lines: list[Line] = dataclasses.field(default_factory=list)
    layers: list[LayerLine] = dataclasses.field(default_factory=list)

    def save(self, options: argparse.Namespace) -> None:
        if options.json:
            layers = [dataclasses.asdict(layer) for layer in self.layers]
            products = [line.as_json() for line in self.lines]
            options.json.write_text(json.dumps({"products": products, "layers": layers}, indent=1))
        if options.cuts:
            options.cuts.write_text(table_text(self.lines, options.margin))


def run(options: argparse.Namespace, device: torch.device, results: Results) -> None:
    """Rehearse, then measure line by line; those the budget did not reach are left out."""
    end = time.monotonic() + options.budget_s

    def late() -> bool:
        return time.monotonic() > end

    wanted = [product for model in options.models for product in products_of(model) if product.name in options.products]
    lines = [Line(product, rows) for product in wanted for rows in options.rows]
    rehearsals = rehearsals_of(lines)
    begin_s = time.monotonic()
    verdicts = rehearse(rehearsals, workers=options.workers, device=device.type, limit_s=options.budget_s * 0.6)
    right = {key for key, problem in verdicts.items() if problem is None}
    print(f"{len(right)} of {len(rehearsals)} cuts compiled and right after {time.monotonic() - begin_s:.0f} s")
    for rehearsal in rehearsals:
        problem = verdicts.get((rehearsal.product, rehearsal.cut), "no answer in time")
        if problem is not None:
            print(f"  skipped: {rehearsal.product.model} {rehearsal.product.name} {named(rehearsal.cut)}: {problem}")
    print(
        "| model | product | rows | cuBLAS µs | ours µs | faster | of floor | cut |\n|---|---|---|---|---|---|---|---|"
    )
    for product in wanted:
        size = 2 * product.weight_rows * product.inputs
        copies = 3 if device.type == "cpu" else min(48, max(4, -(-int(_ROTATION_BYTES) // size)))
        weights = Weights(product, copies, device)
        for line in (line for line in lines if line.product == product):
            if late():
                print(f"stopped: the budget of {options.budget_s:.0f} s is spent")
                return
            cuts = cuts_to_try(product, line.rows)
            line.problems = {cut: verdicts.get((product, cut)) or "no answer in time" for cut in cuts
                             if (product, cut) not in right}  # fmt: skip
            measure(line, weights, [cut for cut in cuts if (product, cut) in right], late)
            print_line(line)
            results.lines.append(line)
    print(
        "| model | rows | products of a layer, cuBLAS µs | ours where faster µs | faster | of floor |\n|---|---|---|---|---|---|"
    )
    for whole in measure_layers(results.lines, device, late):
        results.layers.append(whole)
        print(f"| {whole.model:12} | {whole.rows:4d} | {whole.cublas_us:7.2f} | {whole.ours_us:7.2f} "
              f"| {whole.cublas_us / whole.ours_us:4.2f}x | {whole.floor_us / whole.ours_us:5.0%} |", flush=True)  # fmt: skip


def _names(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(allowed)}")
        return names

    return parse


def _counts(text: str) -> list[int]:
    counts = sorted({int(word) for word in text.split(",") if word})
    if not counts or counts[0] < 1 or counts[-1] > 256:
        raise argparse.ArgumentTypeError("numbers of rows from 1 to 256, with commas between them")
    return counts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--models", type=_names(SHAPES), default="qwen2.5-1.5b,llama-3.2-3b")
    parser.add_argument("--products", type=_names(("qkv", "o", "gate_up", "down")), default="qkv,o,gate_up,down")
    parser.add_argument("--rows", type=_counts, default="2,8,16,32,64,100,128,192,256")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--budget-s", type=float, default=220.0, help="stop after so long and print what there is")
    parser.add_argument(
        "--margin", type=float, default=0.02, help="by which a cut must win to be in the table of --cuts"
    )
    parser.add_argument("--json", type=Path, help="every time of every cut")
    parser.add_argument("--cuts", type=Path, help="the winners as they are written in skinny_cuts.py")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin_s = time.monotonic()
    results = Results()
    try:
        with torch.inference_mode():
            run(options, device, results)
    finally:  # whatever happened, what was measured is kept
        results.save(options)
    print(f"{len(results.lines)} lines in {time.monotonic() - begin_s:.0f} s on {device.type}")


if __name__ == "__main__":
    main()
