"""Guesses on the CUDA path, through the interpreter: one small batch. `tests/gpu/test_speculation.py` has the rest."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from benchmarks.scripted_guesses import ScriptedSpeculator

from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tests.parity.test_engine import prompts
from tests.unit.models.cuda.test_engine import CONFIG, small_tilings  # noqa: F401  # which is used by all tests here
from tonle.engine.request import GenerationConfig
from tonle.engine.schedule import Drafts


def test_rows_with_guesses_beside_one_without() -> None:
    """The first row is sampled and guessed for, right and wrong; the second goes on beside it, one step ahead."""
    model = tiny_model("qwen2")
    asked = prompts([6, 3], model.config.vocab_size)
    wishes = [
        GenerationConfig(max_length=16, temperature=1.0, seed=3, early_stopping=False, logprobs=0),
        GenerationConfig(max_length=12, do_sample=False, early_stopping=False),
    ]
    driver = Driver(model, CONFIG)
    scheduler, runner = driver.loop._scheduler, driver.loop._runner
    told: list[list[list[int]]] = []
    for guessing in (False, True):
        if not guessing:
            scheduler.drafts = None
        else:
            drafter = ScriptedSpeculator(3, 40, vocab_size=model.config.vocab_size, rate=0.75, always=True)
            drafter.record(asked[0], told[0][0])
            scheduler.drafts = Drafts(
                drafter, ahead=drafter, may_check=runner.checks_drafts, max_entries=runner.max_entries
            )
        scheduler.pool.drop_idle()
        before = len(driver.steps)
        told.append(driver.run([driver.ask(prompt, wish) for prompt, wish in zip(asked, wishes, strict=True)]))
        logprobs = [r.logprob for step in driver.steps[before:] for records in step.logprobs.values() for r in records]
        if not guessing:
            wanted = logprobs
    assert told[1] == told[0]
    assert logprobs == pytest.approx(wanted, abs=1e-4)
    assert scheduler.drafts is not None and 0 < scheduler.drafts.num_accepted < scheduler.drafts.num_tokens
