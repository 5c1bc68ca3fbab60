"""Other kernels take over while requests run: nothing that the earlier ones computed is used any more."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tonle.config.engine import EngineConfig
from tonle.engine.request import GenerationConfig

MODEL = tiny_model("llama")
GREEDY = GenerationConfig(max_length=16, do_sample=False, early_stopping=False)
PROMPTS = [[5, 6, 7], list(range(3, 60)), [9] * 20]
BEFORE = 6  # tokens of each request that the first kernels compute


def other_model() -> Any:
    """The same shapes, other numbers: as if kernels rounded very differently."""
    model = copy.deepcopy(MODEL)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += 0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


def driver(model: Any) -> Driver:
    return Driver(model, EngineConfig(max_num_batched_tokens=256, block_size=4, speculation="off"))


def test_requests_go_on_as_if_the_new_kernels_had_computed_all() -> None:
    later = driver(other_model())
    own = driver(MODEL)
    runner = own.loop._runner
    launch = runner.launch

    def launch_or_switch(plan: Any) -> Any:
        if not switched and all(sequence.num_output == BEFORE for sequence in plan.sequences):
            switched.append(plan)
            runner._model = later.loop._runner._model
            runner._model.kernel_changes = 1
        return launch(plan)

    switched: list[Any] = []
    runner.launch = launch_or_switch  # type: ignore[method-assign]
    outputs = own.generate(PROMPTS, GREEDY)
    assert switched
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        # one token more is of the step in which they changed: from earlier keys and values
        known = prompt + output[: BEFORE + 1]
        assert output[BEFORE + 1 :] == later.generate([known], GREEDY)[0][: 16 - BEFORE - 1]
    hits = own.stats.prefix_hits
    assert own.generate(PROMPTS, GREEDY) == later.generate(PROMPTS, GREEDY)
    assert own.stats.prefix_hits > hits, "what was computed again is shared again"
