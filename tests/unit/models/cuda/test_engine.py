"""The whole CUDA path, kernel by kernel through the interpreter: same greedy tokens as transformers, with one step of lag."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tests.parity.test_engine import assert_same, prompts, reference
from tonle.config.engine import EngineConfig
from tonle.engine import build as build_module
from tonle.engine.build_cuda import cuda_machine
from tonle.engine.plan import Plan
from tonle.engine.request import GenerationConfig
from tonle.engine.run import graphs
from tonle.models.cuda import decode_attention, decode_tiling, gemv, sample

NEW = 4
GREEDY = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
CONFIG = EngineConfig(max_batch_size=3, max_num_batched_tokens=40, max_sequence_length=96, device="cpu")


@pytest.fixture(autouse=True)
def small_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA machine on a CPU, and kernels cut for models of a few hundred numbers: few programs, more than one turn."""
    monkeypatch.setattr(
        build_module, "_cuda_machine", lambda decoder, config: cuda_machine(decoder, config, capture=False)
    )
    for module in (decode_tiling, decode_attention):
        monkeypatch.setattr(
            module,
            "decode_tiling",
            lambda rows, kv_heads, fp8=False: decode_tiling.DecodeTiling(32, 4, 3, 8, rows < 3 and not fp8),
        )
    monkeypatch.setattr(gemv, "gemv_tiling", lambda outputs, inputs, norm: gemv.GemvTiling(64, 32, warps=1))
    monkeypatch.setattr(sample, "_STRETCHES", 2)
    monkeypatch.setattr(sample, "_BLOCK", 256)


def assert_greedy(model: Any, asked: list[list[int]], outputs: list[list[int]]) -> None:
    for prompt, output in zip(asked, outputs, strict=True):
        assert_same(model, prompt, output, reference(model, prompt, NEW))


@pytest.mark.parametrize("family", ["qwen3", "mistral"])  # norms per head; a window
def test_mixed_steps(family: str) -> None:
    model = tiny_model(family)
    asked = prompts([2, 17, 70], model.config.vocab_size)
    assert_greedy(model, asked, Driver(model, CONFIG).generate(asked, GREEDY, arrive_every=2))


def test_steps_padded_as_graphs_pad_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph would replay is run instead, at the size it would have been captured with."""
    monkeypatch.setattr(graphs, "captured", lambda work, pool: SimpleNamespace(replay=work))
    for name in ("graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(build_module, "_cuda_machine", cuda_machine)
    model = tiny_model("qwen2")
    config = replace(CONFIG, max_batch_size=6)
    asked = prompts([2, 20, 3, 33, 9], model.config.vocab_size)  # rungs: 1, 2, 4, 6 rows and samples; 16, 32, 40 tokens
    assert_greedy(model, asked, Driver(model, config).generate(asked, GREEDY, arrive_every=1))


def test_nothing_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was dropped before may own graphs; to free them in the middle of a capture ends it with an error."""
    model = tiny_model("qwen2")
    collected: list[bool] = []  # whether a capture was under way
    under_way = [False]

    def captured(work: Any, pool: Any) -> SimpleNamespace:
        under_way[0] = True
        garbage: Any = torch.nn.Module()  # anything that can be watched
        garbage.itself = [garbage]
        weakref.finalize(garbage, lambda: collected.append(under_way[0]))
        del garbage
        _ = [[] for _ in range(3000)]  # more than the collector waits for
        work()
        under_way[0] = False
        return SimpleNamespace(replay=work)

    monkeypatch.setattr(graphs, "captured", captured)
    for name in ("graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(build_module, "_cuda_machine", cuda_machine)
    driver = Driver(model, replace(CONFIG, max_batch_size=1, max_num_batched_tokens=16))
    gc.collect()
    assert collected == [False] * driver.loop._runner._graphs.num_graphs  # type: ignore[attr-defined]


def test_biases_and_tied_embeddings() -> None:
    model = tiny_model("qwen2")
    asked = prompts([9, 1, 30], model.config.vocab_size)
    driver = Driver(model, CONFIG)
    assert_greedy(model, asked, driver.generate(asked, GREEDY))
    assert_greedy(model, asked[:1], driver.generate(asked[:1], GREEDY))  # one row: everything fused


def test_prefix_hits() -> None:
    model = tiny_model("llama")
    common, *tails = prompts([70, 1, 9], model.config.vocab_size)
    driver = Driver(model, CONFIG)
    assert_greedy(model, [common], driver.generate([common], GREEDY))  # its first chunk samples nothing
    asked = [common[:64] + tail for tail in tails]  # four blocks are found: one token is left, and nine
    assert_greedy(model, asked, driver.generate(asked, GREEDY, arrive_every=1))
    assert driver.stats.prefix_hits == 128


@torch.inference_mode()
def test_described_prompts_among_decoding_rows() -> None:
    """Prompts' log-probabilities and the tokens sampled in the same steps both come from what the body left."""
    model = tiny_model("qwen3")
    asked = prompts([2, 50, 17], model.config.vocab_size)  # 2: one token is described, alone
    wish = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False, prompt_logprobs=0, logprobs=0)
    driver = Driver(model, CONFIG)
    outputs = driver.generate(asked, wish, arrive_every=2)
    assert_greedy(model, asked, outputs)
    for handle, (prompt, output) in enumerate(zip(asked, outputs, strict=True), start=1):
        text = torch.tensor([prompt + output])
        wanted = model(text).logits[0, :-1].log_softmax(-1).gather(1, text[0, 1:, None]).squeeze(1)
        described = [r for step in driver.steps for r in step.prompt_logprobs.get(handle, (0, []))[1]]
        sampled = [r for step in driver.steps for r in step.logprobs.get(handle, [])]
        ours = torch.tensor([record.logprob for record in described + sampled])
        assert len(described) == len(prompt) - 1 and torch.allclose(ours, wanted, atol=1e-4)


@torch.inference_mode()
def test_eight_bit_keys_and_values_of_any_size() -> None:
    """Large keys met by small queries are the same model, though e4m3 itself ends at 448 and at 0.002."""
    exact, eighth, small, large = (_described(stretch, dtype) for stretch, dtype in (
        (1.0, "auto"), (1.0, "fp8"), (2.0**-13, "fp8"), (2.0**12, "fp8")))  # fmt: skip
    assert 0 < float((eighth - exact).abs().mean()) < 0.1 * float(exact.std())
    torch.testing.assert_close(small, eighth, rtol=0, atol=1e-3)
    torch.testing.assert_close(large, eighth, rtol=0, atol=1e-3)


def _described(stretch: float, kv_cache_dtype: str) -> torch.Tensor:
    """Log-probabilities of prompts and of what follows them, from a model with keys and values so much larger."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        for weight, factor in (("k", stretch), ("q", 1 / stretch), ("v", stretch), ("o", 1 / stretch)):
            getattr(layer.self_attn, f"{weight}_proj").weight *= factor
    asked = prompts([40, 7, 21], model.config.vocab_size)
    bias = {17: 1000.0}  # all say the same, so that all answers are described over the same text
    wish = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False, prompt_logprobs=0, logprobs=0,
                            logit_bias=bias)  # fmt: skip
    driver = Driver(model, replace(CONFIG, kv_cache_dtype=kv_cache_dtype))
    assert driver.generate(asked, wish, arrive_every=2) == [[17] * NEW] * 3
    found = [r for step in driver.steps for records in step.prompt_logprobs.values() for r in records[1]]
    found += [r for step in driver.steps for records in step.logprobs.values() for r in records]
    return torch.tensor([record.logprob for record in found])


@torch.inference_mode()
def test_head_and_description_leave_each_other_alone() -> None:
    runner: Any = Driver(tiny_model("llama"), CONFIG).loop._runner
    plan = Plan(rows=[0, 1], starts=[0, 0], chunks=prompts([5, 3], 320), samples=[True, True])  # type: ignore[arg-type]
    plan.new_blocks = [(0, 0, [0]), (1, 0, [1])]
    packed = runner._packer.pack(plan)
    runner._copy(packed)
    runner._net.body(packed.num_tokens, tiles=packed.num_tiles)
    ends = torch.tensor([4, 7])  # the last token of each
    before = runner._net.describe(ends)
    runner._net.head(2)
    assert torch.equal(runner._net.logits[:2], before)
    assert torch.equal(runner._net.describe(ends), before)
    assert torch.allclose(runner._net.describe(ends[1:]), before[1:], atol=1e-5)  # one token: another way to the same
