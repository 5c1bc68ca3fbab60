"""Products of decode steps with 2 to 16 rows on one GPU: cuBLAS against our kernel, in the tiling its rule gives.

    python -m benchmarks.gpu_products --json products.json

Prints one line per model, product and number of rows. cuBLAS means all that one launch of ours replaces: the product with bias
or residual, and for gate and up the activation, too. Times are of CUDA graphs that walk through more copies of the weights
than L2 holds. Both results are compared with float32 beforehand; one that is off ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, silu

from benchmarks.gpu_step import median_ms
from benchmarks.workload import READ_BYTES_PER_S, SHAPES
from tonle.models.cuda.pointwise import gate_mul
from tonle.models.cuda.skinny import SplitScratch, skinny, skinny_tiling

MAX_ERROR = 2e-2  # of the largest output; gated: four roundings to bfloat16, 0.2 % each, and 1.01 % was seen
_ROTATION_BYTES = 200_000_000  # of weights: more than three times L2
_MIN_LAUNCHES = 24  # per graph, so that its own start does not count
_REPEATS = 15

Launch = Callable[[torch.Tensor, torch.Tensor], object]  # weight, out


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix of a model: what it multiplies, and what rides along."""

    model: str
    name: str
    outputs: int
    inputs: int
    bias: bool = False
    add: bool = False
    glu: bool = False
    norm: bool = False  # one row's kernel norms its input, too

    @property
    def weight_rows(self) -> int:
        return self.outputs * (2 if self.glu else 1)


def products_of(model: str) -> list[Product]:
    shape = SHAPES[model]
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    head_dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
    q, kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    return [
        Product(model, "qkv", q + 2 * kv, hidden, bias=shape["model_type"] == "qwen2", norm=True),
        Product(model, "o", hidden, q, add=True),
        Product(model, "gate_up", wide, hidden, glu=True, norm=True),
        Product(model, "down", hidden, wide, add=True),
    ]


class Case:
    """One product with one number of rows, by cuBLAS and by ours."""

    def __init__(self, product: Product, rows: int, device: torch.device) -> None:
        self.product = product
        self.tiling = skinny_tiling(rows, product.outputs, product.inputs, glu=product.glu)
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32  # triton's interpreter has no bfloat16
        self._x = torch.randn(rows, product.inputs, device=device, dtype=dtype)
        self._bias = self._x.new_empty(product.weight_rows).normal_() if product.bias else None
        self._wide = self._x.new_empty(rows, product.weight_rows)  # gate and up, of cuBLAS
        self._scratch = SplitScratch([(product.outputs, self.tiling)], device)
        weight_bytes = 2 * product.weight_rows * product.inputs
        self.floor_us = weight_bytes / READ_BYTES_PER_S * 1e6
        shape = (max(4, -(-_ROTATION_BYTES // weight_bytes)) if on_gpu else 1, product.weight_rows, product.inputs)
        self._weights = self._x.new_empty(shape).normal_(std=product.inputs**-0.5)

    def cublas(self, weight: torch.Tensor, out: torch.Tensor) -> None:
        into = self._wide if self.product.glu else out
        if self.product.add:
            out.addmm_(self._x, weight.t())
        elif self._bias is not None:
            torch.addmm(self._bias, self._x, weight.t(), out=into)
        else:
            torch.mm(self._x, weight.t(), out=into)
        if self.product.glu:
            gate_mul(self._wide, out)

    def ours(self, weight: torch.Tensor, out: torch.Tensor) -> None:
        assert self.tiling is not None
        add, glu = self.product.add, self.product.glu
        skinny(self._x, weight, out, self.tiling, bias=self._bias, add=add, glu=glu, scratch=self._scratch)

    def check(self, launch: Launch) -> None:
        """Against float32. What is not written stays NaN, which is not less than anything."""
        product, weight = self.product, self._weights[0]
        out = self._x.new_full((self._x.shape[0], product.outputs), torch.nan)
        expected = linear(self._x.float(), weight.float(), None if self._bias is None else self._bias.float())
        if product.glu:
            gate, up = expected.chunk(2, dim=-1)
            expected = silu(gate) * up
        if product.add:
            expected += out.normal_()
        launch(weight, out)
        error = float((out - expected).abs().max() / expected.abs().max())
        if not error < MAX_ERROR:
            raise SystemExit(f"{launch.__name__} is off by {error:.2g} of the largest output: {product}, {self.tiling}")

    def median_us(self, launch: Launch) -> float:
        """Microseconds of one launch, in a graph that takes all weights in turn."""
        weights, out = self._weights, self._x.new_zeros(self._x.shape[0], self.product.outputs)
        if out.device.type != "cuda":
            return float("nan")  # results can be tried on a CPU, times cannot
        turns = len(weights) * -(-_MIN_LAUNCHES // len(weights))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(turns):
                launch(weights[turn % len(weights)], out)
        return median_ms(graph.replay, _REPEATS) / turns * 1e3


def measure(product: Product, rows: int, device: torch.device) -> dict[str, Any]:
    """One line of the table, printed. Without a tiling the model uses cuBLAS, and there is nothing to compare."""
    case = Case(product, rows, device)
    case.check(case.cublas)
    line = {**asdict(product), "rows": rows, "floor_us": case.floor_us, "cublas_us": case.median_us(case.cublas)}
    text = f"| {product.model} | {product.name} | {rows} | {line['cublas_us']:.2f} |"
    if case.tiling is None:
        print(text, "– | – | – | – |", flush=True)
        return line
    case.check(case.ours)
    us, tiling = case.median_us(case.ours), case.tiling
    shape = f"{tiling.block_n} x {tiling.block_k}, {tiling.stages} stages, split {tiling.split}"
    print(f"{text} {us:.2f} | {line['cublas_us'] / us:.2f}x | {case.floor_us / us:.0%} | {shape} |", flush=True)
    return {**line, "ours_us": us, "cut": asdict(tiling)}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["qwen2.5-1.5b", "llama-3.2-3b", "llama-2-7b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--json", type=Path, help="save all lines here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("| model | product | rows | cuBLAS µs | ours µs | faster | of floor | cut |\n" + "|---" * 8 + "|")
    products = [product for model in options.models for product in products_of(model)]
    lines = [measure(product, rows, device) for product in products for rows in options.rows]
    if options.json:
        options.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
