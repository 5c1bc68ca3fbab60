"""One row with a LoRA adapter on one GPU: the four products of a layer, without adapter, with it inside, with it apart.

    python -m benchmarks.gpu_one_row_adapter --rank 16

Prints microseconds per layer of CUDA graphs that walk through some layers of the model's shape (without attention), and the
ratio to no adapter. "inside": the products' own kernels compute A x and add B (A x); "apart": a kernel ahead of each computes
A x. All results are compared with float32 and merged weights beforehand, in graphs that are replayed with changing slots.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear, rms_norm, silu

from benchmarks.gpu_products import Product, products_of
from benchmarks.gpu_step import median_ms
from benchmarks.workload import SHAPES
from tonle.models.cuda.gemv import gemv
from tonle.models.cuda.gemv_adapter import OneRowAdapter, OneRowScratch

LAYERS = 8  # more weights than L2 holds
SLOTS = 4
EPS = 1e-6
MAX_ERROR = 5e-2  # of the largest number: every product of every layer rounds to bfloat16; an adapter left out gives 1
_ROUNDS = 5  # of each way, in turns
_REPEATS = 60


@dataclass(frozen=True)
class Part:
    """One product of one layer."""

    product: Product
    weight: torch.Tensor  # (outputs, inputs), the first rows of the wide one
    bias: torch.Tensor | None
    gain: torch.Tensor | None
    adapter: OneRowAdapter


def sizes_of(product: Product, hidden: int) -> tuple[int, ...]:
    """Outputs of the product's modules."""
    if product.name == "qkv":
        kv = (product.outputs - hidden) // 2
        return (hidden, kv, kv)
    return (product.outputs,) * (2 if product.glu else 1)


class Chain:
    """Some layers' products, each reading what the one ahead of it wrote."""

    def __init__(self, model: str, rank: int, layers: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # triton's interpreter has no bfloat16
        shape = SHAPES[model]
        hidden = shape["hidden_size"]
        head_dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
        self._q_size = shape["num_attention_heads"] * head_dim
        self.slot = torch.zeros(1, dtype=torch.int32, device=device)
        self._scratch = OneRowScratch(rank, device)
        self._first = torch.randn(1, hidden, device=device, dtype=dtype)
        self.products = products_of(model)
        self.outs = {p.name: self._first.new_zeros(1, p.outputs) for p in self.products if not p.add}
        self.hidden = self._first.clone()
        self.layers = [[self._part(product, rank) for product in self.products] for _ in range(layers)]

    def _part(self, product: Product, rank: int) -> Part:
        sizes = sizes_of(product, self._q_size)
        rows, new = len(sizes) * rank, self._first.new_empty
        wide = new(product.weight_rows + SLOTS * rows, product.inputs).normal_(std=product.inputs**-0.5)
        b = new(SLOTS, product.weight_rows, rank).normal_(std=rank**-0.5)
        a = wide[product.weight_rows :].view(SLOTS, rows, product.inputs)
        return Part(
            product,
            wide[: product.weight_rows],
            new(product.weight_rows).normal_() if product.bias else None,
            None if product.add else new(product.inputs).normal_(1.0, 0.1),
            OneRowAdapter(self.slot, a, b, sizes, self._scratch, product.name),
        )

    def _inputs_and_out(self, product: Product) -> tuple[torch.Tensor, torch.Tensor]:
        """o reads the queries: attention is left out."""
        if product.name == "o":
            return self.outs["qkv"][:, : self._q_size], self.hidden
        if product.name == "down":
            return self.outs["gate_up"], self.hidden
        return self.hidden, self.outs[product.name]

    def run(self, adapted: bool, fused: bool = True) -> None:
        self.hidden.copy_(self._first)
        for layer in self.layers:
            for part in layer:
                x, out = self._inputs_and_out(part.product)
                adapter = replace(part.adapter, fused=fused) if adapted else None
                add, glu = part.product.add, part.product.glu
                gemv(x, part.weight, out, gain=part.gain, eps=EPS, bias=part.bias, add=add,
                     settled=part.product.name == "down", glu=glu, adapter=adapter)  # fmt: skip

    def expected(self, slot: int) -> torch.Tensor:
        """The last hidden state, in float32 with merged weights."""
        state = {name: out.float() for name, out in self.outs.items()}
        hidden = self._first.float()
        for layer in self.layers:
            for part in layer:
                name = part.product.name
                x = state["qkv"][:, : self._q_size] if name == "o" else state["gate_up"] if name == "down" else hidden
                if part.gain is not None:
                    x = rms_norm(x, x.shape[1:], part.gain.float(), EPS)
                y = linear(x, merged(part, slot), None if part.bias is None else part.bias.float())
                if part.product.add:
                    hidden = hidden + y
                elif part.product.glu:
                    gate, up = y.chunk(2, dim=-1)
                    state[name] = silu(gate) * up
                else:
                    state[name] = y
        return hidden


def merged(part: Part, slot: int) -> torch.Tensor:
    weight, rank, begin = part.weight.float().clone(), part.adapter.rank, 0
    if slot < 0:
        return weight
    for module, size in enumerate(part.adapter.sizes):
        a = part.adapter.a[slot, module * rank : (module + 1) * rank].float()
        weight[begin : begin + size] += part.adapter.b[slot, begin : begin + size].float() @ a
        begin += size
    return weight


def graph_of(work: Callable[[], None]) -> Callable[[], None]:
    work()  # compiles
    if not torch.cuda.is_available():
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def check(chain: Chain, way: str, replay: Callable[[], None], slots: list[int]) -> None:
    """Each slot's result, replayed one right after another. NaN is not less than anything."""
    for slot in slots:
        chain.slot.fill_(slot)
        for _ in range(3):
            replay()
        expected = chain.expected(slot)
        error = float((chain.hidden.float() - expected).abs().max() / expected.abs().max())
        if not error < MAX_ERROR:
            raise SystemExit(f"{way}: off by {error:.2g} of the largest number with slot {slot}")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=LAYERS)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chain = Chain(options.model, options.rank, options.layers, device)
    ways = {
        "no adapter": graph_of(lambda: chain.run(adapted=False)),
        "inside": graph_of(lambda: chain.run(adapted=True)),
        "apart": graph_of(lambda: chain.run(adapted=True, fused=False)),
    }
    for way, replay in ways.items():
        check(chain, way, replay, [-1] if way == "no adapter" else [0, 3, -1, 1, 1, 2])
    print(f"{options.model}, rank {options.rank}: results are those of merged weights")
    if device.type != "cuda":
        return  # results can be tried on a CPU, times cannot
    times: dict[str, list[float]] = {way: [] for way in ways}
    chain.slot.fill_(1)
    for _ in range(_ROUNDS):
        for way, replay in ways.items():
            times[way].append(median_ms(replay, _REPEATS) * 1e3 / options.layers)
    base = sorted(times["no adapter"])[_ROUNDS // 2]
    print("| way | µs per layer | lowest, highest | more | ratio |\n|---|---|---|---|---|")
    for way, each in times.items():
        middle = sorted(each)[_ROUNDS // 2]
        print(
            f"| {way} | {middle:.2f} | {min(each):.2f}, {max(each):.2f} | {middle - base:+.2f} | {middle / base:.3f} |"
        )


if __name__ == "__main__":
    main()
