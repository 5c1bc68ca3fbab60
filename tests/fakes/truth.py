"""Generated text against a reference: how far tokens and log-probabilities are off, and how far they may be.

Distances are in units of the reference's spread: the standard deviation of its logits over the vocabulary. A right model
is off by its rounding, whatever it says; a wrong one by a good part of 1, because it ranks other tokens first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Logits = Callable[[list[int]], torch.Tensor]  # of a text's tokens: (tokens, vocab) float32


@dataclass(frozen=True)
class Bound:
    """What rounding may do to one text, in spreads."""

    mean: float  # of its tokens' log-probabilities
    most: float  # of one token's; one that was chosen may be twice as far below the reference's best: either may be off


# Measured with transformers in bfloat16 against itself in float32 on models of 2 and 3 layers (`python -m
# tests.gpu.mutations --reference`): bfloat16 is off by up to 0.024 on average and 0.10 at most, and the slightest mutant, a
# last layer without its mixer, by 0.26 on average. 28 layers round more, 0.09 and 0.23.
BOUNDS = {torch.float32: Bound(1e-3, 1e-2), torch.float16: Bound(0.02, 0.08), torch.bfloat16: Bound(0.08, 0.3)}
DEEP = Bound(0.25, 1.0)
_SEVERAL = 5  # texts; a single one may well run in circles


@dataclass(frozen=True)
class Text:
    """An answer, and the log-probability that was told with each of its tokens; none if none was asked for."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Distance:
    """From a reference, in spreads."""

    mean: float  # of log-probabilities
    most: float
    below: float  # of the token that lies furthest below the reference's best
    same: int  # tokens that are the reference's best
    variety: int  # different tokens among the reference's best ones


@torch.inference_mode()
def transformers_logits(model: Any) -> Logits:
    return lambda text: model(torch.tensor([text], device=model.device)).logits[0].float()


@torch.inference_mode()
def distance(text: Text, logits: Logits) -> Distance:
    """Of one text. `logits` is the reference's."""
    found = logits(text.prompt + text.output[:-1])[len(text.prompt) - 1 :]  # (output, vocab)
    spread = float(found.std(-1).mean())
    chosen = torch.tensor(text.output, device=found.device)[:, None]
    below = (found.amax(-1) - found.gather(1, chosen).squeeze(1)) / spread
    best = found.argmax(-1)
    mean = most = 0.0
    if text.logprobs:
        theirs = found.log_softmax(-1).gather(1, chosen).squeeze(1).cpu()
        off = (torch.tensor(text.logprobs) - theirs).abs() / spread
        mean, most = float(off.mean()), float(off.max())
    return Distance(mean, most, float(below.max()), int((best == chosen[:, 0]).sum()), len(set(best.tolist())))


def judge(texts: list[Text], logits: Logits, bound: Bound, by: str) -> None:
    """`AssertionError` unless every text is the reference's own, up to rounding; and unless there is something to see."""
    found = [distance(text, logits) for text in texts]
    for number, each in enumerate(found):
        where = f"text {number} of {len(found)}, {len(texts[number].prompt)} tokens long, by {by}: {each}"
        assert each.below <= 2 * bound.most, f"a token is not the reference's best: {where}"
        assert each.most <= bound.most, f"a log-probability is wrong: {where}"
        assert each.mean <= bound.mean, f"log-probabilities are wrong: {where}"
    tokens = sum(len(text.output) for text in texts)
    distinct = sum(each.variety for each in found)
    if len(texts) >= _SEVERAL:
        assert distinct > 0.2 * tokens, (
            f"the reference repeats itself ({distinct} different of {tokens}): it tells little"
        )


def judge_told(text: Text, logits: Logits, bound: Bound) -> None:
    """Log-probabilities alone, of a text that no model chose."""
    found = distance(text, logits)
    assert found.most <= bound.most and found.mean <= bound.mean, f"log-probabilities are wrong: {found}"


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], new: int) -> Text:
    """What a transformers model says, with its log-probabilities."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    output = out.sequences[0, len(prompt) :]
    told = torch.stack(out.logits, dim=1)[0].float().log_softmax(-1).gather(1, output[:, None]).squeeze(1)
    return Text(prompt, output.tolist(), told.tolist())


def teacher_forced(model: Any, text: Text) -> Text:
    """The same text, with the log-probabilities that another transformers model gives it."""
    found = transformers_logits(model)(text.prompt + text.output[:-1])[len(text.prompt) - 1 :].log_softmax(-1)
    told = found.gather(1, torch.tensor(text.output)[:, None]).squeeze(1)
    return Text(text.prompt, text.output, told.tolist())
