"""The default model says what transformers says with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.driver import Driver
from tests.parity.test_engine import assert_same, reference
from tests.parity.test_forward import reference as logits_of
from tests.unit.models.stepper import Stepper
from tonle.config.engine import EngineConfig
from tonle.engine.request import GenerationConfig
from tonle.engine.text import load_text
from tonle.models.load import load
from tonle.models.source import ModelSource

pytestmark = pytest.mark.model

NEW = 32
GREEDY = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "ភ្នំពេញ គឺជា",
    "Once upon a time, in a village by a great river, there lived " * 12,
]


def read_by_transformers(path: Path) -> Any:
    """What `from_pretrained(gguf_file=...)` does, without the accelerate package it asks for."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = (
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent, gguf_file=path.name)).float().eval()
    )
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])  # tied
    return model


@pytest.fixture(scope="module")
def theirs(default_model: ModelSource) -> Any:
    return read_by_transformers(default_model.path)


def test_greedy_tokens_alone_and_in_a_busy_batch(default_model: ModelSource, theirs: Any) -> None:
    text = load_text(default_model)
    prompts = [[text.encode("x")[0]], *(text.encode(prompt) for prompt in PROMPTS)]
    answers = [reference(theirs, prompt, NEW) for prompt in prompts]
    driver = Driver(default_model, EngineConfig(memory_pool_size=2**29, activation_bits=16))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same(theirs, prompt, driver.generate([prompt], GREEDY)[0], answer)
    crowd = [text.encode(f"{i}. Tell me about the number {i}") for i in range(11)]
    outputs = driver.generate([*prompts, *crowd], GREEDY, arrive_every=1)
    for prompt, answer, output in zip(prompts, answers, outputs, strict=False):
        assert_same(theirs, prompt, output, answer)


@pytest.mark.usefixtures("one_thread")
def test_logits_step_by_step(default_model: ModelSource, theirs: Any) -> None:
    decoder = load(default_model)
    for prompt in (
        [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2],
        [504, 3575, 282, 4649, 314],
        [504, 2988, 314, 260],
    ):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False,
                                  eos_token_id=None, pad_token_id=0)[0].tolist()  # fmt: skip
        stepper = Stepper(decoder, [out])
        stepper.step({0: len(prompt)})
        for _ in range(len(prompt), len(out)):
            stepper.step({0: 1})
        torch.testing.assert_close(stepper.of(0), logits_of(theirs, out), rtol=0, atol=1e-3)
        assert stepper.of(0)[len(prompt) - 1 : -1].argmax(-1).tolist() == out[len(prompt) :]
