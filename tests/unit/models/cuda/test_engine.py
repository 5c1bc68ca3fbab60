"""The whole CUDA path, kernel by kernel through the interpreter: same greedy tokens as transformers, with one step of lag."""

from __future__ import annotations

import pytest

from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tests.parity.test_engine import assert_same, prompts, reference
from tonle.config.engine import EngineConfig
from tonle.engine import build as build_module
from tonle.engine.build_cuda import cuda_machine
from tonle.engine.request import GenerationConfig
from tonle.models.cuda import cuts, decode, sample

NEW = 4


@pytest.mark.parametrize("family", ["qwen3", "mistral"])  # norms per head; a window
def test_mixed_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        build_module, "_cuda_machine", lambda decoder, config: cuda_machine(decoder, config, capture=False)
    )
    for module in (cuts, decode):
        monkeypatch.setattr(module, "cut_for", lambda rows: cuts.Cut(32, 4, 3, programs=8, eager=rows < 3))
    monkeypatch.setattr(sample, "_STRETCHES", 2)
    monkeypatch.setattr(sample, "_BLOCK", 256)
    model = tiny_model(family)
    asked = prompts([2, 17, 70], model.config.vocab_size)
    config = EngineConfig(max_batch_size=3, max_num_batched_tokens=40, max_sequence_length=96, device="cpu")
    greedy = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
    for prompt, output in zip(asked, Driver(model, config).generate(asked, greedy, arrive_every=2), strict=True):
        assert_same(model, prompt, output, reference(model, prompt, NEW))
