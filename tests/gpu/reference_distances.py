"""What the bounds of `tests/fakes/truth.py` rest on: how far bfloat16 and each mutant are from a model in float32.

Does: transformers against transformers, on the CPU, with the models of the GPU tests. Does not: run our code.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.fakes.features import FEATURES, MUTANTS, rounded
from tests.fakes.truth import BOUNDS, Distance, Text, distance, greedy, teacher_forced, transformers_logits
from tests.gpu.cases import SIZES, USUAL

LENGTHS = (3, 40, 200)
NEW = 24


def _distances(model: Any, other: Any, texts: list[Text]) -> list[Distance]:
    """Of the model's own texts, if `other` tells their log-probabilities."""
    return [distance(teacher_forced(other, text), transformers_logits(model)) for text in texts]


def show(say: Callable[[str], None]) -> None:
    bound = BOUNDS[torch.bfloat16]
    say(f"Distances of log-probabilities in spreads of the logits, by prompts of {LENGTHS} tokens. Allowed in bfloat16: "
        f"{bound.mean} on average of a text, {bound.most} at most.")  # fmt: skip
    for name, feature in FEATURES.items():
        rng = random.Random(1)
        model = rounded(feature.model(**SIZES.get(name, USUAL)), torch.bfloat16, keep=True)
        prompts = [[rng.randrange(6, model.config.vocab_size) for _ in range(length)] for length in LENGTHS]
        texts = [greedy(model, prompt, NEW) for prompt in prompts]
        variety = [len(set(text.output)) for text in texts]
        say(f"{name}: {variety} different tokens of {NEW}")
        others = {"bfloat16": rounded(model, torch.bfloat16), **{it: MUTANTS[it](model) for it in feature.mutants}}
        for what, other in others.items():
            found = _distances(model, other, texts)
            means = ", ".join(f"{each.mean:6.3f}" for each in found)
            best = sum(each.same for each in _distances(other, model, texts))  # the model's tokens, judged by `other`
            say(f"    {what:24} mean {means}   most {max(each.most for each in found):6.3f}   "
                f"{best} of {len(texts) * NEW} tokens are its best, too")  # fmt: skip
