"""Rows with constraints on the CUDA path: every token is allowed, the best of those that are; other rows do not notice.

Constraints here are rules over token ids (`tests/fakes/constraints.py`): what a grammar makes of them is tested elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.eager import reference_logits

from tests.gpu.cases import CUDA, INTERPRETED, NEW, Case, make_case, prompts

pytest.importorskip("triton")
if not CUDA and not INTERPRETED:
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from tests.fakes.constraints import Rule, RuleCompiler, random_rule
from tests.fakes.driver import Driver
from tonle.engine import build as build_module
from tonle.engine.build_cuda import cuda_machine
from tonle.engine.request import GenerationConfig, Request

pytestmark = pytest.mark.gpu
GREEDY = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
SAMPLED = GenerationConfig(max_length=NEW, seed=5, temperature=0.8, top_p=0.95, early_stopping=False)
PENALTIES = GenerationConfig(max_length=NEW, seed=5, temperature=0.8, repetition_penalty=1.3, frequency_penalty=2.0,
                             early_stopping=False)  # fmt: skip
COUNT = 12 if CUDA else 2
MACHINE: dict[str, Any] = {"max_batch_size": 24, "max_num_batched_tokens": 256} if CUDA else {}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """In float32: what is best does not depend on the company that a row is computed in, but for the last bits."""
    return make_case("llama3", torch.float32, tmp_path_factory.mktemp("model"))


def rules(case: Case) -> dict[int, Rule]:
    """Of a few of the vocabulary's tokens, so that forced ones come again, and penalties tell."""
    return {handle: random_rule(handle, 40, forced=0.5, free=0.1, end=0.0) for handle in range(COUNT)}


@pytest.fixture(scope="module" if CUDA else "function")  # the interpreter's settings are a test's own
def driver(case: Case) -> Iterator[Driver]:
    yield with_compiler(case, case.driver(**MACHINE))
    torch.cuda.empty_cache()


def with_compiler(case: Case, driver: Driver) -> Driver:
    own = rules(case)
    driver.loop._compiler = RuleCompiler(lambda request: own[int(request.grammar)], case.vocab_size)
    return driver


def ask(
    driver: Driver, case: Case, configs: list[GenerationConfig], bound: list[bool], **how: Any
) -> tuple[list[Request], list[list[int]]]:
    asked = [
        driver.ask(prompt, replace_seed(config, i), grammar=str(i) if is_bound else "")
        for i, (prompt, config, is_bound) in enumerate(
            zip(prompts(case, [3 + 11 * i for i in range(len(configs))]), configs, bound, strict=True)
        )
    ]
    return asked, driver.run(asked, **how)


def replace_seed(config: GenerationConfig, seed: int) -> GenerationConfig:
    return GenerationConfig(**{name: getattr(config, name) for name in config.__struct_fields__} | {"seed": seed})


def test_the_best_that_is_allowed(case: Case, driver: Driver) -> None:
    """By our eager decoder's logits: no token that is allowed is better than the one drawn, but for rounding."""
    asked, outputs = ask(driver, case, [GREEDY] * COUNT, [True] * COUNT, arrive_every=2)
    for i, (request, output) in enumerate(zip(asked, outputs, strict=True)):
        logits = reference_logits(case.reference, request.prompt + output)[len(request.prompt) - 1 : -1].float().cpu()
        for place, token in enumerate(output):
            allowed = rules(case)[i](tuple(output[:place]))
            assert not isinstance(allowed, str) and (allowed is None or token in allowed)
            choice = logits[place] if allowed is None else logits[place, sorted(allowed)]
            assert float(choice.max() - logits[place, token]) < 1e-3, f"token {place} of request {i}"


def test_neighbours_do_not_notice(case: Case, driver: Driver) -> None:
    """With one prompt at a time in a step, and without: bound rows beside others, with penalties and without."""
    kinds = [GREEDY, SAMPLED, PENALTIES]
    configs = [kinds[i % 3] for i in range(COUNT)]
    bound = [i % 4 == 0 for i in range(COUNT)]
    for how in ({}, {"arrive_every": 2}):
        _, alone = ask(driver, case, configs, [False] * COUNT, **how)
        _, among = ask(driver, case, configs, bound, **how)
        assert [text for text, is_bound in zip(among, bound, strict=True) if not is_bound] == [
            text for text, is_bound in zip(alone, bound, strict=True) if not is_bound
        ]


@pytest.mark.parametrize("config", [GREEDY, SAMPLED, PENALTIES], ids=["greedy", "sampled", "penalties"])
def test_jumps_lag_and_graphs_change_nothing(
    case: Case, driver: Driver, config: GenerationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = [i % 3 != 1 for i in range(COUNT)]
    limits = driver.loop._scheduler.limits
    outputs = []
    for min_forced in (1, 99):
        driver.loop._scheduler.limits = replace(limits, min_forced=min_forced)
        outputs.append(ask(driver, case, [config] * COUNT, bound)[1])
    driver.loop._scheduler.limits = limits
    monkeypatch.setattr(
        build_module, "_cuda_machine", lambda decoder, config: cuda_machine(decoder, config, capture=False, lag=0)
    )
    eager = with_compiler(case, case.driver(**MACHINE))
    outputs.append(ask(eager, case, [config] * COUNT, bound)[1])
    assert outputs[0] == outputs[1] == outputs[2]


def test_log_probabilities_are_those_of_the_model(case: Case, driver: Driver) -> None:
    config = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False, logprobs=1)
    seen = len(driver.steps)
    asked, outputs = ask(driver, case, [config] * COUNT, [True] * COUNT)
    for request, output in zip(asked, outputs, strict=True):
        told = [record for step in driver.steps[seen:] for record in step.logprobs.get(request.handle, [])]
        assert [record.token for record in told] == output
        logits = reference_logits(case.reference, request.prompt + output)[len(request.prompt) - 1 : -1].float().cpu()
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None]).squeeze(1)
        assert torch.allclose(torch.tensor([record.logprob for record in told]), wanted, atol=1e-3)


@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter minutes")
def test_more_rows_than_are_drawn_at_a_time(case: Case) -> None:
    """100 bound rows of 150, which arrive while others run."""
    driver = case.driver()
    rng = random.Random(1)
    allowed = {handle: frozenset(rng.sample(range(case.vocab_size), 50)) for handle in range(100)}
    driver.loop._compiler = RuleCompiler(lambda request: lambda said: allowed[int(request.grammar)], case.vocab_size)
    asked = [
        driver.ask(prompt, replace_seed(SAMPLED, i), grammar=str(i) if i < 100 else "")
        for i, prompt in enumerate(prompts(case, [3 + i % 40 for i in range(150)]))
    ]
    outputs = driver.run(asked)
    assert all(set(output) <= allowed[i] for i, output in enumerate(outputs[:100]))
    assert all(len(output) == NEW for output in outputs)
