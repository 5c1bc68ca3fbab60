"""Which tilings make whole steps faster on one GPU, and where the time of a step goes: what a served model runs, in one command.

    python -m benchmarks.gpu_tuning fp8 experts one-row --seconds 60

Does: build models as `tonle serve --load-format random` would, capture steps of served sizes in graphs, and time them with one
product cut otherwise, product after product, keeping what was fastest; print few lines. `fp8`: e4m3 weights against bf16, kernel
by kernel, and with the last matrix unpacked instead of multiplied as the embedding it is made of. `experts`: some layers of a
mixture. `one-row`: a single row. `few-bits`: a single row with weights in few bits.
Does not: check results beyond comparing logits with those of the rule; one that fails or is off is named and left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_step import kernel_shares, median_ms, plan_of
from benchmarks.workload import READ_BYTES_PER_S, weight_bytes, write_config
from tonle.config.engine import EngineConfig
from tonle.engine.build_cuda import cuda_machine
from tonle.engine.run.cuda import CudaRunner
from tonle.engine.run.graphs import _DECODE, _HEAD, _MIXED, _smallest, captured, max_tiles
from tonle.models.cuda import experts_grouped, fp8_product, gemv, pair_gemv, quantized_matrix
from tonle.models.cuda.experts_grouped import GroupedTiling
from tonle.models.cuda.fp8_product import Fp8Tiling
from tonle.models.cuda.gemv import GemvTiling
from tonle.models.cuda.launch import compiling_only
from tonle.models.cuda.model import CudaModel
from tonle.models.cuda.pair_gemv import PairTiling
from tonle.models.cuda.quantized_matrix import QuantizedMatrix
from tonle.models.decoder import Decoder
from tonle.models.packed import Packed
from tonle.models.quantize import Quantization, assemble_quantized
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource
from tonle.models.weights import Owned, random_tensors

CUDA = torch.device("cuda")
MOST_OFF = 0.2  # of the logits' norm: roundings to e4m3 that come out otherwise go through all layers
_REPEATS = 15
_KERNELS = 9  # lines of a profile


def net_of(name: str, rows: int, tokens: int, *, layers: int = 0, to: str = "") -> tuple[CudaRunner, CudaModel]:
    """As the engine builds it, without graphs. `layers`: only the first ones."""
    with tempfile.TemporaryDirectory() as root:
        spec = read_spec(ModelSource("folder", write_config(name, Path(root)), name)).for_context(2048)
    if layers:
        spec = replace(spec, layers=spec.layers[:layers])
    how = Quantization(to) if to else None  # type: ignore[arg-type]
    made = random_tensors(spec, CUDA, seed=0)
    weights = assemble_quantized(spec, made, Owned(CUDA, torch.bfloat16), how, CUDA, torch.bfloat16)
    config = EngineConfig(max_batch_size=rows, max_num_batched_tokens=tokens, max_sequence_length=2048,
                          memory_pool_size=20 * 2**30)  # fmt: skip
    machine = cuda_machine(Decoder(spec, weights), config, capture=False)
    assert machine is not None and isinstance(machine.runner, CudaRunner)
    machine.kv.k.normal_()
    machine.kv.v.normal_()
    net = machine.runner._net
    net.compile()
    return machine.runner, net


@dataclass(frozen=True, slots=True)
class Size:
    """Rows that decode, and tokens of a prompt beside them."""

    rows: int
    prompt: int = 0
    context: int = 400

    def __str__(self) -> str:
        return f"{self.rows}+{self.prompt}" if self.prompt else str(self.rows)


class Step:
    """One step on the device, captured anew for each way to cut it."""

    def __init__(self, runner: CudaRunner, size: Size) -> None:
        self.net = net = runner._net
        plan = plan_of(size.rows, size.context, size.prompt)
        runner.collect(runner.launch(plan))
        packed = runner._packer.pack(plan)
        self.samples = len(plan.rows)
        self._tokens = torch.randint(10, 30000, net.last.shape, dtype=net.last.dtype, device=net.last.device)
        if packed.num_tiles is None:
            rung = _smallest(list(_DECODE), packed.num_tokens) or packed.num_tokens
            self._work: Callable[[], None] = lambda: net.decode(rung)
        else:
            rung = _smallest(list(_MIXED), packed.num_tokens) or packed.num_tokens
            head = min(_smallest(list(_HEAD), self.samples) or self.samples, net.sizes.max_rows)

            def mixed() -> None:
                net.body(rung, tiles=max_tiles(rung))
                net.head(head)

            self._work = mixed
        self.wanted: torch.Tensor | None = None

    def compile(self) -> None:
        """Inside `compiling_only`: two layers launch what all do."""
        every = self.net._layers
        self.net._layers = every[:2]
        try:
            self._work()
        finally:
            self.net._layers = every

    def graph(self) -> Callable[[], None]:
        graph = captured(self._fresh, None)

        def replay() -> None:
            self.net.last.copy_(self._tokens)
            graph.replay()

        return replay

    def _fresh(self) -> None:
        self.net.last.copy_(self._tokens)
        self._work()

    def ms(self) -> float:
        """NaN, and a line, if the logits are not those of the first time."""
        replay = self.graph()
        replay()
        logits = self.net.logits[: self.samples].float()
        if self.wanted is None:
            self.wanted = logits.clone()
        off = float((logits - self.wanted).norm() / self.wanted.norm())
        if not off < MOST_OFF:
            print(f"    OFF by {off:.2g}", end="")
            return float("nan")
        return median_ms(replay, _REPEATS)


Rule = Callable[[str, Any], Any]  # a product's name, what the rule says -> what is used


def descend(step: Step, names: list[str], candidates: Callable[[str], list[Any]], use: Callable[[Rule], Any], label: str,
            until: float) -> dict[str, Any]:  # fmt: skip
    """Product after product in every way; the fastest stays. Prints the rule's time, and each product's three best."""
    kept: dict[str, Any] = {}

    def rule_with(changed: dict[str, Any]) -> Rule:
        return lambda name, rule: changed.get(name, rule)

    with compiling_only():
        for name in names:
            for one in candidates(name):
                with use(rule_with({name: one})):
                    try:
                        step.compile()
                    except Exception as error:
                        print(f"    {name} {short(one)}: {str(error)[:80]!r}")
    with use(rule_with({})):
        best = step.ms()
    print(f"  {label}: rule {best:.3f} ms", flush=True)
    for name in names:
        found: list[tuple[float, Any]] = []
        for one in candidates(name):
            if time.monotonic() > until:
                break
            try:
                with use(rule_with({**kept, name: one})):
                    found.append((step.ms(), one))
            except Exception as error:  # too much shared memory, or too many registers
                found.append((float("nan"), one))
                if "out of resource" not in str(error):
                    print(f"    {name} {short(one)}: {type(error).__name__} {str(error)[:60]!r}", flush=True)
        good = sorted((pair for pair in found if pair[0] == pair[0]), key=lambda pair: pair[0])
        text = "; ".join(f"{ms:.3f} {short(one)}" for ms, one in good[:3])
        print(f"    {name:8} {best:.3f} -> {text}{'' if len(good) == len(found) else f' ({len(found) - len(good)} failed)'}",
              flush=True)  # fmt: skip
        if good and good[0][0] < best * 0.998:
            best, kept[name] = good[0]
    changed = ", ".join(f"{name} {short(one)}" for name, one in kept.items()) or "the rule"
    print(f"  {label}: best {best:.3f} ms with {changed}", flush=True)
    return kept


def short(tiling: Any) -> str:
    match tiling:
        case Fp8Tiling():
            form = f"{tiling.block_n}x{tiling.block_m} s{tiling.stages} w{tiling.warps}"
            extra = (f" /{tiling.split}" if tiling.split > 1 else "") + (f" f{tiling.fetch}" if tiling.fetch else "")
            return form + extra
        case GroupedTiling():
            return f"{tiling.block_n}x{tiling.block_m}x{tiling.block_k} s{tiling.stages} w{tiling.warps}"
        case PairTiling():
            return f"{tiling.block_n} w{tiling.warps} t{tiling.times} a{tiling.ahead}"
        case GemvTiling():
            return f"{tiling.block_n}x{tiling.block_k} w{tiling.warps} s{tiling.stages} a{tiling.ahead}"
        case _:
            return str(tiling)


def profile(step: Step, label: str) -> None:
    """Kernels overlap, and one that waits for the one ahead counts as running: sums may exceed the step."""
    replay = step.graph()
    print(f"  {label}: {median_ms(replay, _REPEATS):.3f} ms")
    for name, ms, launches in kernel_shares(replay)[:_KERNELS]:
        print(f"    {ms:7.3f} ms {launches:4d} x {name[:48]}", flush=True)


# -- e4m3 weights


@contextmanager
def patched(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def fp8_use(net: CudaModel) -> Callable[[Rule], Any]:
    layer, original = net._layers[0], fp8_product.fp8_tiling
    names = {
        matrix.packed.shape[0]: name for name, matrix in layer.matrices.items() if isinstance(matrix, QuantizedMatrix)
    }
    inputs = {
        matrix.packed.shape[1]: name for name, matrix in layer.matrices.items() if isinstance(matrix, QuantizedMatrix)
    }

    def use(rule: Rule) -> Any:
        def tiling(outputs: int, width: int, rows: int) -> Any:
            name = names.get(outputs, "")
            if name in ("o", "down"):  # as many outputs
                name = "down" if inputs.get(width) == "down" else "o"
            return rule(name, original(outputs, width, rows))

        return patched(fp8_product, fp8_tiling=tiling)

    return use


def fp8_candidates(rows: int) -> Callable[[str], list[Any]]:
    wide: list[Any] = [Fp8Tiling(n, m, s, w) for n, m, s, w in (
        (128, 128, 5, 8), (128, 128, 3, 4), (256, 128, 4, 8), (256, 128, 3, 8), (128, 256, 4, 8), (128, 256, 3, 8),
        (256, 64, 4, 8), (64, 256, 4, 4), (64, 128, 6, 4), (128, 64, 6, 4))]  # fmt: skip
    narrow: list[Any] = [Fp8Tiling(n, m, s, w, split=p, fetch=f) for n, m, s, w, p, f in (
        (128, 128, 5, 8, 2, 0), (128, 128, 5, 8, 4, 0), (128, 64, 6, 4, 2, 4), (64, 64, 6, 4, 1, 4), (64, 128, 6, 4, 1, 4),
        (64, 128, 6, 4, 2, 4), (128, 128, 5, 8, 1, 4), (64, 64, 4, 4, 2, 0))]  # fmt: skip
    wide = [one for one in wide if one.block_m <= 128 or rows > 128]
    return lambda name: wide if name == "gate_up" else [*wide, *narrow]


def fp8(options: argparse.Namespace) -> None:
    until = time.monotonic() + options.seconds
    sizes = [Size(100), Size(128), Size(256), Size(100, 216)]
    runner, net = net_of("llama-3.2-3b", 257, 1024)
    bf16 = {}
    for size in sizes:
        step = Step(runner, size)
        bf16[size] = step.ms()
        if size in (sizes[0], sizes[3]):
            profile(step, f"bf16 {size} rows")
        del step
    del runner, net
    torch.cuda.empty_cache()
    runner, net = net_of("llama-3.2-3b", 257, 1024, to="fp8")
    head = net._lm_head
    assert isinstance(head, QuantizedMatrix)
    twin = head.twin

    def taken_back(unpacked: bool) -> None:
        head.twin = None if unpacked else twin
        net._share()

    print("| rows | bf16 | fp8, head unpacked | head as embedding | |")
    for size in sizes:
        times = []
        for unpacked in (True, False):
            taken_back(unpacked)
            times.append(Step(runner, size).ms())
        print(f"| {size} | {bf16[size]:.3f} | {' | '.join(f'{ms:.3f}' for ms in times)} | {bf16[size] / times[-1]:.2f}x |",
              flush=True)  # fmt: skip
    for size in (sizes[0], sizes[3]):
        profile(Step(runner, size), f"fp8 {size} rows")
    assert head.room is not None
    head.room.split.parts = torch.zeros(2**24, device=CUDA)
    head.room.split.arrived = torch.zeros(8192, dtype=torch.int32, device=CUDA)
    for size in (sizes[0], sizes[2], sizes[3]):
        rows = size.rows + size.prompt
        names = ["gate_up", "down", "qkv", "o"]
        descend(Step(runner, size), names, fp8_candidates(rows), fp8_use(net), f"fp8 {size} rows", until)


# -- experts


def experts(options: argparse.Namespace) -> None:
    until, layers = time.monotonic() + options.seconds, 8
    runner, _ = net_of("qwen3-30b-a3b", 257, 1024, layers=layers)
    original = experts_grouped.grouped_tiling

    def use(rule: Rule) -> Any:
        def tiling(pairs: int, count: int, *, glu: bool) -> Any:
            return rule("gate_up" if glu else "down", original(pairs, count, glu=glu))

        return patched(experts_grouped, grouped_tiling=tiling)

    few = [(64, 16, 128, 3, 4), (64, 16, 128, 4, 4), (64, 16, 64, 4, 4),
           (64, 16, 64, 6, 4), (32, 16, 128, 4, 4), (32, 16, 256, 3, 4),
           (64, 16, 256, 2, 4), (128, 16, 64, 4, 8), (128, 16, 64, 6, 8), (64, 16, 128, 5, 8)]  # fmt: skip
    some = [(64, 32, 64, 5, 4), (64, 32, 128, 3, 4), (64, 32, 64, 4, 4),
            (64, 32, 64, 6, 4), (32, 32, 128, 4, 4), (64, 64, 64, 4, 4), (128, 32, 64, 4, 8),
            (128, 32, 64, 6, 8), (64, 32, 128, 5, 8), (64, 64, 128, 3, 4), (128, 64, 64, 4, 8)]  # fmt: skip
    for size in (Size(100), Size(256), Size(100, 216), Size(256, 200)):
        step = Step(runner, size)
        if not size.prompt or size.rows == 256:
            profile(step, f"experts {size} rows, {layers} of 48 layers")
        listed = few if size.rows + size.prompt < 160 else some
        candidates = {
            glu: [GroupedTiling(n if glu else 2 * n, m, k, s, w) for n, m, k, s, w in listed]
            for glu in (True, False)
        }
        descend(step, ["gate_up", "down"], lambda name, c=candidates: c[name == "gate_up"], use,
                f"experts {size} rows, {layers} layers", until)  # fmt: skip


# -- one row


def one_row(options: argparse.Namespace) -> None:
    until = time.monotonic() + options.seconds
    name = options.model
    runner, net = net_of(name, 8, 512)
    layer = net._layers[0]
    shapes = {(m.outputs // (2 if n == "gate_up" else 1), m.weight.shape[1]): n  # type: ignore[union-attr]
              for n, m in layer.matrices.items()}  # fmt: skip
    shapes[net.spec.vocab_size, net.spec.hidden_size] = "head"
    original = gemv.gemv_tiling

    def use(rule: Rule) -> Any:
        def tiling(outputs: int, inputs: int, *, norm: bool) -> Any:
            return rule(shapes.get((outputs, inputs), ""), original(outputs, inputs, norm=norm))

        return patched(gemv, gemv_tiling=tiling)

    lists: dict[str, list[tuple[int, ...]]] = {
        "gate_up": [(1, 512, 1), (1, 1024, 1), (1, 1024, 2), (1, 1024, 4), (2, 512, 2), (2, 512, 4), (2, 1024, 4),
                    (1, 512, 2, 0, 2), (1, 1024, 2, 0, 2), (2, 512, 2, 1), (4, 512, 4, 1), (2, 512, 2, 2), (2, 1024, 4, 1),
                    (1, 2048, 4)],
        "down": [(2, 512, 2, 0, 2), (2, 512, 2, 0, 5), (2, 512, 2, 0, 6), (2, 512, 2, 0, 8), (2, 1024, 4, 0, 2),
                 (2, 1024, 4, 0, 4), (1, 1024, 2, 0, 4), (1, 1024, 2, 0, 7), (4, 512, 4, 0, 4), (4, 1024, 4, 0, 2),
                 (1, 2048, 4, 0, 3), (4, 1024, 8, 0, 3), (4, 512, 4, 4), (8, 512, 8, 4), (2, 1024, 4, 3)],
        "qkv": [(2, 1024, 2), (4, 512, 2), (2, 512, 1), (2, 512, 2), (4, 1024, 4), (4, 1024, 2, 0, 2), (2, 1024, 2, 0, 2),
                (2, 1024, 2, 0, 4), (1, 1024, 1, 0, 2), (8, 512, 4), (2, 2048, 4), (4, 512, 4, 1)],
        "o": [(4, 1024, 4, 0, 4), (2, 1024, 2, 0, 4), (2, 1024, 1, 0, 4), (2, 512, 1, 0, 8), (2, 512, 2, 0, 8),
              (4, 512, 2, 0, 8), (1, 1024, 1, 0, 4), (4, 1024, 2, 0, 2), (2, 2048, 2, 0, 2)],
        "head": [(2, 512, 2, 1), (4, 512, 2, 1), (4, 512, 4, 2), (4, 512, 4, 3), (8, 512, 8, 1), (4, 1024, 4, 1),
                 (2, 1024, 2, 1), (1, 1024, 2), (2, 512, 2), (2, 1024, 2), (8, 512, 4, 1)],
    }  # fmt: skip
    floor = weight_bytes(name) / READ_BYTES_PER_S * 1e3
    print(f"  {name}: reading the weights takes {floor:.3f} ms")
    step = Step(runner, Size(1, context=290))
    names = ["gate_up", "down", "qkv", "o", "head"]
    profile(step, f"{name}, one row")
    descend(step, names, lambda product: [GemvTiling(*one) for one in lists[product]], use, f"{name}, one row", until)


# -- one row of few-bit weights


def few_bits(options: argparse.Namespace) -> None:
    lists: dict[str, list[tuple[int, ...]]] = {
        "gate_up": [(2, 1, 4), (2, 1, 2), (4, 1, 1), (4, 4, 2), (2, 2, 2), (2, 2, 4), (2, 2, 3), (1, 2, 4, 2), (2, 4, 2),
                    (2, 4, 4), (1, 1, 4), (1, 2, 4)],
        "down": [(4, 8, 2), (4, 8, 4), (4, 4, 2), (2, 8, 2), (2, 8, 4), (2, 8, 4, 2), (2, 4, 4, 2), (4, 8, 2, 2), (2, 8, 8, 2),
                 (8, 8, 2), (8, 8, 1)],
        "qkv": [(8, 4, 1), (8, 1, 1), (4, 4, 2), (4, 2, 1), (2, 2, 2), (8, 2, 1), (4, 8, 2), (8, 8, 1), (1, 2, 4, 2), (4, 1, 1),
                (8, 8, 2)],
        "o": [(4, 4, 2), (8, 1, 1), (8, 4, 2), (4, 8, 2), (8, 8, 1), (4, 2, 2), (8, 4, 1), (4, 8, 2, 2), (8, 2, 1), (4, 4, 2, 2)],
    }  # fmt: skip
    pairs_of = pair_gemv.pair_gemv_tiling
    for form in options.forms:
        until = time.monotonic() + options.seconds / len(options.forms)
        runner, net = net_of("llama-3.2-3b", 8, 512, to=form)
        shapes = {
            (m.packed.shape[0], m.packed.shape[1]): n
            for n, m in net._layers[0].matrices.items()
            if isinstance(m, QuantizedMatrix)
        }

        def use(rule: Rule, shapes: dict[Any, str] = shapes) -> Any:
            def tiling(packed: Packed, *, glu: bool) -> Any:
                name = shapes.get((packed.shape[0], packed.shape[1]), "")
                return rule(name, pairs_of(packed, glu=glu))

            return patched(pair_gemv, pair_gemv_tiling=tiling)

        with patched(quantized_matrix, IN_PAIRS=frozenset(options.forms) | {"int8"}):
            descend(Step(runner, Size(1)), ["gate_up", "down", "qkv", "o"],
                    lambda name: [PairTiling(*one) for one in lists[name]], use, f"{form}, one row", until)  # fmt: skip
        del runner, net
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("parts", nargs="+", choices=["fp8", "experts", "one-row", "few-bits"])
    parser.add_argument(
        "--seconds", type=float, default=60, help="of each part: no further tiling is tried after so many"
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="of one row")
    parser.add_argument("--forms", nargs="+", default=["int4", "fp8", "int8"], help="of few-bits")
    options = parser.parse_args()
    for part in options.parts:
        began = time.monotonic()
        print(f"== {part}", flush=True)
        try:
            with torch.inference_mode():
                {"fp8": fp8, "experts": experts, "one-row": one_row, "few-bits": few_bits}[part](options)
        except Exception as error:  # the others may run
            print(f"  {part} ended: {type(error).__name__} {str(error)[:300]!r}", flush=True)
        torch.cuda.empty_cache()
        print(f"== {part}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
