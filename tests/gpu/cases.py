"""The models that tests on a GPU run, and the references that judge them.

Where there is no GPU, everything here also runs on a CPU under Triton's interpreter, with smaller models and shorter texts:
`TRITON_INTERPRET=1 pytest tests/gpu/test_features.py`.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.eager import reference_logits

from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tests.fakes.expert_checkpoints import tiny_experts
from tests.fakes.features import FEATURES, rounded
from tests.fakes.tiny_families import LONGROPE
from tests.fakes.truth import BOUNDS, Bound, Text, judge, judge_told, transformers_logits
from tonle.config.engine import EngineConfig
from tonle.engine.request import GenerationConfig
from tonle.models.decoder import Decoder
from tonle.models.load import load
from tonle.models.source import ModelSource, resolve

CUDA = torch.cuda.is_available()
INTERPRETED = not CUDA and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if CUDA else "cpu")
NEW = 24 if CUDA else 4
GREEDY = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False, logprobs=0)
BY_TRANSFORMERS = 6  # texts of a batch that transformers judges, on the CPU; our own decoder judges all

USUAL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
          "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 5000, "max_position_embeddings": 4096}  # fmt: skip
# Different sizes and numbers of heads, where kernels are cut differently.
SIZES: dict[str, dict[str, Any]] = {
    "llama3": {**USUAL, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 24,
               "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 9001},
    "biases": {**USUAL, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 12,
               "vocab_size": 8000},
    "head-norms": {**USUAL, "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip

_TWO_LAYERS = {**USUAL, "num_hidden_layers": 2}
_WIDE_HEADS = {**_TWO_LAYERS, "num_key_value_heads": 4, "head_dim": 256}
_LONG = {
    **LONGROPE,
    **{name: [factor for factor in LONGROPE[name] for _ in range(6)] for name in ("short_factor", "long_factor")},
}
# Where real models of a family have heads of another size.
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "gemma2": _WIDE_HEADS,
    "gemma3": _WIDE_HEADS,
    "phi3": {**_TWO_LAYERS, "hidden_size": 768, "head_dim": 96, "rope_parameters": _LONG},
}


@dataclass
class Case:
    """A model on disk, and the same one as references have it."""

    name: str
    source: ModelSource
    dtype: torch.dtype
    reference: Decoder  # ours, of plain torch operations, on the device
    truth: (
        Any | None
    )  # transformers, on the CPU, in float32 with the weights that `dtype` holds; None: too large for it
    bound: Bound

    @property
    def vocab_size(self) -> int:
        return self.reference.spec.vocab_size

    def config(self, **more: Any) -> EngineConfig:
        usual: dict[str, Any] = {"max_batch_size": 256, "max_num_batched_tokens": 2048, "max_sequence_length": 512,
                                 "memory_pool_size": 2**31}  # fmt: skip
        if INTERPRETED:
            usual = {"max_batch_size": 3, "max_num_batched_tokens": 40, "max_sequence_length": 96}
        dtype = str(self.dtype).removeprefix("torch.")
        return EngineConfig(**{**usual, "device": DEVICE.type, "dtype": dtype, **more})

    def driver(self, **more: Any) -> Driver:
        return Driver(self.source, self.config(**more))

    def judge(self, texts: list[Text]) -> None:
        """By our own decoder, which runs plain torch operations, and some of them by transformers."""
        judge(texts, lambda text: reference_logits(self.reference, text), self.bound, "our eager decoder")
        if self.truth is not None:
            some = texts[:: -(-len(texts) // BY_TRANSFORMERS)]
            judge(some, transformers_logits(self.truth), self.bound, "transformers in float32")

    def judge_prompt(self, prompt: list[int], told: list[float]) -> None:
        """Log-probabilities of a prompt's own tokens, from its second on."""
        judge_told(Text(prompt[:1], prompt[1:], told), lambda text: reference_logits(self.reference, text), self.bound)
        if self.truth is not None:
            judge_told(Text(prompt[:1], prompt[1:], told), transformers_logits(self.truth), self.bound)


def make_case(name: str, dtype: torch.dtype, folder: Path) -> Case:
    """The model of a feature, written to `folder`."""
    return _saved(name, FEATURES[name].model(**(SIZES.get(name, USUAL) if CUDA else {})), dtype, folder)


def family_case(family: str, dtype: torch.dtype, folder: Path) -> Case:
    """A model of a family, written to `folder`."""
    return _saved(family, tiny_model(family, **(FAMILY_SIZES.get(family, _TWO_LAYERS) if CUDA else {})), dtype, folder)


def expert_case(family: str, folder: Path) -> Case:
    """In float32: half precision may choose another expert, which no bound on log-probabilities allows for."""
    return _saved(family, tiny_experts(family), torch.float32, folder)


def _saved(name: str, model: Any, dtype: torch.dtype, folder: Path) -> Case:
    model.save_pretrained(folder)
    source = resolve(folder)
    reference = load(source, device=DEVICE, dtype=dtype)
    return Case(name, source, dtype, reference, rounded(model, dtype, keep=True), BOUNDS[dtype])


def prompts(case: Case, lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6, case.vocab_size) for _ in range(length)] for length in lengths]


def lengths(count: int, seed: int, low: int = 1, high: int = 220) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(low, high) for _ in range(count)]


def generate(driver: Driver, asked: list[list[int]], config: GenerationConfig = GREEDY, **how: Any) -> list[Text]:
    """Texts with the log-probabilities that were told with them, if they were asked for."""
    before, first = len(driver.steps), driver._next + 1
    outputs = driver.generate(asked, config, **how)
    told: dict[int, list[float]] = {}
    for step in driver.steps[before:]:
        for handle, records in step.logprobs.items():
            told.setdefault(handle, []).extend(record.logprob for record in records)
    texts = [
        Text(prompt, output, told.get(first + i, []))
        for i, (prompt, output) in enumerate(zip(asked, outputs, strict=True))
    ]
    for text in texts:
        assert len(text.output) == config.max_length
        assert len(text.logprobs) == (len(text.output) if config.logprobs is not None else 0)
    return texts
