"""The tests see: a model without one of its features is further from the model itself than any test here or on a GPU allows."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.features import FEATURES, MUTANTS, rounded
from tests.fakes.truth import BOUNDS, greedy, judge, teacher_forced, transformers_logits
from tests.parity.test_forward import check
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.open import open_cpu
from tonle.models.load import load
from tonle.models.source import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (2, 40, 70)
NEW = 16
LOOSEST = BOUNDS[torch.bfloat16]


@pytest.fixture(scope="module", params=FEATURES)
def name(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return rounded(FEATURES[name].model(), torch.bfloat16, keep=True)


@pytest.fixture(scope="module")
def prompts(model: Any) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, model.config.vocab_size) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def texts(model: Any, prompts: list[list[int]]) -> Any:
    return [greedy(model, prompt, NEW) for prompt in prompts]


def test_rounding_passes(model: Any, texts: Any) -> None:
    half = rounded(model, torch.bfloat16)
    judge([teacher_forced(half, text) for text in texts], transformers_logits(model), LOOSEST, "float32")


def test_mutants_do_not(name: str, model: Any, prompts: list[list[int]], texts: Any) -> None:
    """Judged by what it says itself, and by log-probabilities of the model's own text alone."""
    for mutant in FEATURES[name].mutants:
        changed = MUTANTS[mutant](model)
        said = [greedy(changed, prompt, NEW) for prompt in prompts]
        for claimed in (said[1:], [teacher_forced(changed, text) for text in texts[1:]]):
            for text in claimed:
                with pytest.raises(AssertionError, match=r"is not the reference's best|is wrong|are wrong"):
                    judge([text], transformers_logits(model), LOOSEST, mutant)


def test_logits_of_our_decoders_tell_them_apart(name: str, model: Any, tmp_path: Path) -> None:
    """What `test_forward` compares, for both decoders of a CPU: one that ignored a feature would be the mutant's."""
    changed = {mutant: MUTANTS[mutant](model) for mutant in FEATURES[name].mutants}
    for number, (mutant, other) in enumerate({"": model, **changed}.items()):
        other.save_pretrained(tmp_path / str(number))
        source = resolve(tmp_path / str(number))
        fast = open_cpu(source)
        assert isinstance(fast, CpuDecoder)
        fast.crossover = sys.maxsize  # also steps that torch would compute faster
        for decoder in (load(source), fast):
            if not mutant:
                check(decoder, model, lengths=[60], chunk=25)  # type: ignore[arg-type]
                continue
            with pytest.raises(AssertionError, match="not close"):
                check(decoder, model, lengths=[60], chunk=25)  # type: ignore[arg-type]
