"""Embeddings through the CUDA runner, kernel by kernel in the interpreter: transformers' last hidden states, pooled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from dataclasses import replace

from tests.fakes.adapters import merge, write_adapter
from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tests.parity.test_embeddings import assert_pooled, logprobs_of
from tests.parity.test_engine import prompts
from tests.unit.models.cuda.test_engine import CONFIG, small_tilings
from tonle.engine.request import POOLINGS, GenerationConfig
from tonle.engine.run import cuda
from tonle.models.load.transformers_model import live_spec

__all__ = ["small_tilings"]  # a fixture

ASKED = prompts([1, 17, 50], 320)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_as_transformers(pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several steps, with several pieces to a step, beside an answer."""
    monkeypatch.setattr(cuda, "_STATES_AT_ONCE", 16)
    model = tiny_model("qwen3")
    driver = Driver(model, CONFIG)
    answer = driver.ask(ASKED[1], GenerationConfig(max_length=6, early_stopping=False))
    driver.run([answer])
    assert_pooled(model, ASKED, driver.embed(ASKED, pooling, arrive_every=1), pooling)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_with_adapters(pooling: str, tmp_path: Path) -> None:
    family = "llama"
    models: dict[str | None, Any] = {None: tiny_model(family)}
    adapter = write_adapter(tmp_path / "one", live_spec(models[None]), rank=5, modules=("q", "v", "up", "down"), seed=1)
    models["one"] = merge(tiny_model(family), adapter)
    driver = Driver(models[None], replace(CONFIG, lora={"one": str(tmp_path / "one")}))
    asked = [ASKED[0], ASKED[1], ASKED[1], ASKED[2]]
    names = ["one", None, "one", "one"]
    found = driver.embed(asked, pooling, adapters=names)
    for prompt, name, vector in zip(asked, names, found, strict=True):
        assert_pooled(models[name], [prompt], [vector], pooling)


def test_a_part_of_a_prompts_log_probabilities() -> None:
    driver = Driver(tiny_model("llama"), CONFIG)
    wish = GenerationConfig(max_length=1, do_sample=False, prompt_logprobs=0)
    whole = logprobs_of(driver, ASKED[2], wish)
    wish.prompt_logprobs_start = 38
    part = logprobs_of(driver, ASKED[2], wish)
    assert part == pytest.approx({place: whole[place] for place in range(38, 50)}, abs=1e-4)
    assert driver.stats.prefix_hits == 32
