"""Rows with constraints on the CUDA path, through the interpreter: the mask kernel, and the tokens of the torch runner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tests.fakes.checkpoints import tiny_model
from tests.fakes.constraints import RuleCompiler
from tests.fakes.driver import Driver
from tests.unit.models.cuda.test_engine import CONFIG, small_tilings  # noqa: F401
from tonle.engine import build as build_module
from tonle.engine.request import GenerationConfig, Request
from tonle.engine.run import bound_rows
from tonle.models.cuda import mask

MODEL = tiny_model("qwen2")
VOCAB = MODEL.config.vocab_size
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 6]
GREEDY = GenerationConfig(max_length=8, do_sample=False, early_stopping=False)
PENALTIES = GenerationConfig(max_length=8, seed=3, temperature=0.9, early_stopping=False, repetition_penalty=1.5,
                             frequency_penalty=2.0, logit_bias={42: 6.0, 43: 6.0}, min_tokens=3)  # fmt: skip
SOME = frozenset(range(1, VOCAB, 3))


@pytest.mark.parametrize("vocab", [64, 75, 320])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_copy(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask, "_BLOCK", 64)
    logits = torch.randn(4, vocab).to(dtype)
    allowed = torch.rand(3, vocab) < 0.4
    words = np.zeros((3, -(-vocab // 32)), np.uint32)
    for row, token in allowed.nonzero().tolist():
        words[row, token // 32] |= np.uint32(1 << token % 32)
    out = torch.full((2, vocab), 7.0)
    places, mask_rows = torch.tensor([3, 0]), torch.tensor([1, 2], dtype=torch.int32)
    mask.mask_logits(places, mask_rows, torch.from_numpy(words.view(np.int32)), logits, out)
    assert torch.equal(out, torch.where(allowed[1:], logits[[3, 0]].float(), -torch.inf))


def rule(history: tuple[int, ...]) -> frozenset[int] | None:
    """One is forced, then one of some, three that are forced, one of any, in turn."""
    turn = len(history) % 6
    return SOME if turn == 1 else None if turn == 5 else frozenset([40 + turn])


def run(configs: list[GenerationConfig], bound: list[bool], lag: int = 1) -> list[list[int]]:
    own = Driver(MODEL, CONFIG, lag=lag, compiler=RuleCompiler(lambda request: rule, VOCAB))
    asked: list[Request] = [own.ask(prompt, config, grammar="x" if is_bound else "")
                            for prompt, config, is_bound in zip(PROMPTS, configs, bound, strict=True)]  # fmt: skip
    return own.run(asked, arrive_every=2)


@pytest.mark.parametrize(("configs", "at_a_time"), [([GREEDY] * 3, 1), ([PENALTIES, GREEDY, PENALTIES], 64)],
                         ids=["greedy", "penalties"])  # fmt: skip
def test_tokens_of_the_torch_runner(
    configs: list[GenerationConfig], at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = [True, False, True]
    monkeypatch.setattr(bound_rows, "_PIECE_ROWS", at_a_time)
    ours = run(configs, bound)
    monkeypatch.setattr(build_module, "_cuda_machine", lambda decoder, config: None)
    assert ours == run(configs, bound)
    assert ours[0][2:5] == ours[2][2:5] == [42, 43, 44] and ours[0][1] in SOME


def test_masks_of_more_rows_than_before() -> None:
    """The buffers grow, and masks are found where they were written."""
    own: Any = Driver(MODEL, CONFIG).loop._runner
    words = -(-VOCAB // 32)
    first = own.mask_rows(2, words)
    assert first.shape == (2, words)
    more = own.mask_rows(40, words)
    assert more.shape == (40, words) and own._bound_rows._layout.capacity == 64
    more[:] = np.arange(40)[:, None]
    layout, host = own._bound_rows._layout, own._bound_rows._host[own._bound_rows._turn]
    assert torch.equal(layout.masks(host)[:40, 0], torch.arange(40, dtype=torch.int32))
    assert layout.numbers(host).sum() == 0 and layout.places(host).sum() == 0
