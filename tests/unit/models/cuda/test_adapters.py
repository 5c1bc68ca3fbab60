"""Adapters through the CUDA runner, kernel by kernel in the interpreter: a row computes what merged weights alone would.

Steps are planned by hand, so that rows, slots, chunks and loads meet as they should. Judged by transformers with the adapter
merged into its weights, by log-probabilities of every token.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tests.fakes.adapters import merge, random_adapter
from tests.fakes.checkpoints import tiny_model
from tests.parity.test_engine import prompts
from tonle.config.engine import EngineConfig
from tonle.engine.build_cuda import cuda_machine
from tonle.engine.plan import Join, Plan
from tonle.engine.request import GenerationConfig
from tonle.engine.run import graphs
from tonle.engine.run.cuda import CudaRunner
from tonle.models.adapters import Adapter
from tonle.models.cuda import decode_attention, decode_tiling, gemv, lora, matrix, sample
from tonle.models.cuda.adapted import CudaAdapters
from tonle.models.cuda.skinny import SkinnyTiling
from tonle.models.load import load

CONFIG = EngineConfig(max_batch_size=5, max_num_batched_tokens=40, max_sequence_length=96, memory_pool_size=2**22)
WISH = GenerationConfig(max_length=64, do_sample=False, early_stopping=False, logprobs=0, prompt_logprobs=0).resolved()
BLOCK, BLOCKS_PER_ROW = CONFIG.block_size, 6
SLOTS = 2


@pytest.fixture(autouse=True)
def small_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels cut for models of a few hundred numbers: few programs, more than one turn."""
    for module in (decode_tiling, decode_attention):
        monkeypatch.setattr(
            module,
            "decode_tiling",
            lambda rows, kv_heads, fp8=False: decode_tiling.DecodeTiling(32, 4, 3, 8, rows < 3 and not fp8),
        )
    few_programs = SkinnyTiling(256, 64, stages=2)
    monkeypatch.setattr(matrix, "skinny_tiling", lambda rows, *_, **__: few_programs if 2 <= rows <= 16 else None)
    monkeypatch.setattr(gemv, "gemv_tiling", lambda outputs, inputs, norm: gemv.GemvTiling(32, 32, warps=1))
    monkeypatch.setattr(sample, "_STRETCHES", 2)
    monkeypatch.setattr(sample, "_BLOCK", 256)


class Rows:
    """A runner, and everything it said about the rows it was given: tokens and their log-probabilities."""

    def __init__(self, family: str, adapters: dict[int, Adapter], **options: Any) -> None:
        self.family = family
        machine = cuda_machine(load(tiny_model(family)), CONFIG, adapter_slots=SLOTS, max_rank=8, **options)
        assert machine is not None and isinstance(machine.runner, CudaRunner)
        self.runner = machine.runner
        self.runner.adapters = {number: self.runner.prepare_adapter(one) for number, one in adapters.items()}  # type: ignore[assignment]
        self.adapters = adapters
        self._tokens: dict[int, list[int]] = {}  # of each row, prompt and answer
        self._logprobs: dict[int, list[float]] = {}
        self._adapter: dict[int, int] = {}
        self._done: dict[int, int] = {}  # tokens in the cache
        self._loads: list[tuple[int, int]] = []
        self._joins: list[Join] = []

    def load(self, slot: int, adapter: int) -> None:
        self._loads.append((slot, adapter))

    def join(self, row: int, prompt: list[int], slot: int = -1, adapter: int = 0) -> None:
        self._tokens[row], self._logprobs[row], self._adapter[row], self._done[row] = list(prompt), [], adapter, 0
        self._joins.append(Join(row, prompt, [], WISH, seed=row, adapter_slot=slot))

    def step(self, **sizes: int) -> None:
        """`r0=5`: row 0 computes five tokens of its prompt; 0: it goes on from its last one."""
        plan = Plan(adapter_loads=self._loads, joins=self._joins)
        self._loads, self._joins = [], []
        for name, size in sizes.items():
            row = int(name[1:])
            start, known = self._done[row], self._tokens[row]
            chunk = known[start : start + size] if size else None
            self._done[row] = start + max(1, size)
            plan.rows.append(row)
            plan.starts.append(start)
            plan.chunks.append(chunk)
            plan.samples.append(self._done[row] == len(known))
            if start == 0:
                plan.new_blocks.append((row, 0, list(range(row * BLOCKS_PER_ROW, (row + 1) * BLOCKS_PER_ROW))))
        result = self.runner.collect(self.runner.launch(plan))
        sampled = iter(result.tokens)
        for i, row in enumerate(plan.rows):
            self._logprobs[row] += [record.logprob for record in result.prompt_logprobs.get(i, [])]
            if plan.samples[i]:
                self._tokens[row].append(next(sampled))
                self._logprobs[row].append(result.logprobs[i].logprob)

    @torch.inference_mode()
    def assert_as_merged(self, row: int) -> None:
        """What was said about a row is what its adapter, merged, says, and far from what the base says."""
        text = torch.tensor([self._tokens[row]])
        ours = torch.tensor(self._logprobs[row])
        assert len(ours) == text.shape[1] - 1
        base = tiny_model(self.family)
        adapter = self.adapters.get(self._adapter[row])
        merged = base if adapter is None else merge(tiny_model(self.family), adapter)
        wanted, plain = (
            model(text).logits[0, :-1].log_softmax(-1).gather(1, text[0, 1:, None]).squeeze(1)
            for model in (merged, base)
        )
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-4)
        assert adapter is None or (wanted - plain).abs().mean() > 0.1


def adapters_of(family: str) -> dict[int, Adapter]:
    """1 and 2: every module, ranks below and at the slots'. 3: few modules of one layer."""
    spec = load(tiny_model(family)).spec
    return {
        1: random_adapter(spec, rank=8, seed=1),
        2: random_adapter(spec, rank=3, seed=2),
        3: random_adapter(spec, rank=2, modules=["k", "down"], layers=[1], seed=3, strength=2.0),
    }


def prompts_of(*lengths: int) -> list[list[int]]:
    return prompts(list(lengths), 320)


def test_rows_with_adapters_among_rows_without() -> None:
    rows = Rows("qwen2", adapters_of("qwen2"), capture=False)
    first, second, third, fourth = prompts_of(5, 21, 17, 1)
    rows.load(0, 1)
    rows.load(1, 2)
    rows.join(0, first)
    rows.join(1, second, 0, 1)
    rows.join(2, third, 1, 2)
    rows.join(3, fourth, 0, 1)
    rows.step(r0=5, r2=10, r3=1)  # a prompt in two chunks; a prompt of one token
    rows.step(r2=7, r0=0, r3=0, r1=21)
    rows.step(r3=0, r0=0, r1=0, r2=0)
    rows.step(r1=0)  # one row
    rows.step(r0=0)  # one row without
    rows.step(r0=0, r2=0)
    for row in range(4):
        rows.assert_as_merged(row)


def test_a_slot_is_filled_again_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    room = CudaAdapters._room  # what is there before it is filled may be anything
    monkeypatch.setattr(CudaAdapters, "_room", lambda self: room(self).fill_(torch.nan))
    rows = Rows("qwen2", adapters_of("qwen2"), capture=False)
    first, second, third = prompts_of(9, 6, 12)
    rows.load(1, 1)
    rows.join(0, first, 1, 1)
    rows.join(1, second)
    rows.step(r0=9, r1=6)
    rows.step(r0=0, r1=0)
    rows.load(1, 3)  # row 0 has ended; few modules: nothing of the adapter before may be left
    rows.join(2, third, 1, 3)
    rows.step(r2=12, r1=0)
    rows.load(0, 2)
    rows.step(r2=0, r1=0)
    for row in range(3):
        rows.assert_as_merged(row)
    rows.runner._net.set_adapter(0, None)
    rows.runner._net.set_adapter(1, None)
    rows.join(0, second, 0, 0)  # cleared slots add nothing
    rows.step(r0=6)
    rows.step(r0=0)
    rows.assert_as_merged(0)


def test_padded_as_graphs_pad_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph would replay is run instead, at the size it would have been captured with; long residuals by tiles."""
    monkeypatch.setattr(graphs, "captured", lambda work, pool: SimpleNamespace(replay=work))
    monkeypatch.setattr(lora, "FEW_NUMBERS", 4 * 16)  # more than four tokens are many
    for name in ("graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    rows = Rows("llama", adapters_of("llama"))
    assert rows.runner._graphs.num_adapted * 2 == rows.runner._graphs.num_graphs
    lengths = prompts_of(3, 33, 8)
    rows.load(0, 1)
    rows.load(1, 2)
    for row, (prompt, slot) in enumerate(zip(lengths, (-1, 0, 1), strict=True)):
        rows.join(row, prompt, slot, slot + 1)
    rows.step(r0=3, r1=20, r2=8)
    rows.step(r0=0, r1=13, r2=0)
    rows.step(r0=0, r1=0, r2=0)
    rows.step(r1=0)
    for row in range(3):
        rows.assert_as_merged(row)


def test_steps_without_adapters_use_the_plain_graphs() -> None:
    """Also while other rows have adapters: base requests pay nothing."""
    rows = Rows("llama", adapters_of("llama"), capture=False)
    seen: list[bool] = []
    for name in ("decode", "body", "head"):
        run = getattr(rows.runner._net, name)

        def noted(*sizes: Any, adapted: bool = False, run: Any = run, **more: Any) -> None:
            seen.append(adapted)
            run(*sizes, adapted=adapted, **more)

        setattr(rows.runner._net, name, noted)
    rows.load(0, 1)
    first, second = prompts_of(4, 5)
    rows.join(0, first, 0, 1)
    rows.join(1, second)
    rows.step(r1=5)
    rows.step(r1=0)
    assert seen == [False, False, False]
    rows.step(r0=4, r1=0)
    rows.step(r0=0, r1=0)
    assert seen[3:] == [True, True, True]
    rows.join(0, first)  # the row's next sequence has none
    rows.step(r0=4, r1=0)
    assert seen[6:] == [False, False]
    for row in range(2):
        rows.assert_as_merged(row)


def test_weights_are_held_once() -> None:
    """Wide weights take the place of those they begin with, also in the decoder that brought them."""
    decoder = load(tiny_model("llama"))
    part = decoder.weights.layers[0].o.parts[0]
    part.weight, part.transposed = part.dense.contiguous(), False  # as on a GPU
    machine = cuda_machine(decoder, CONFIG, capture=False, adapter_slots=SLOTS, max_rank=8)
    assert machine is not None and isinstance(machine.runner, CudaRunner)
    layer = machine.runner._net._layers[0]
    assert layer.adapted is not None and isinstance(part.weight, torch.Tensor)
    wide = layer.adapted.o.wide.weight
    assert part.weight.data_ptr() == layer.o.weight.data_ptr() == wide.data_ptr()
