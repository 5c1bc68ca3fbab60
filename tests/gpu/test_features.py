"""Every feature of a model, on the CUDA path: tokens and log-probabilities of our eager decoder and of transformers in float32.

Quick, and what `python -m tests.gpu.mutations` proves: a CUDA path without one of these features fails here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.cases import CUDA, INTERPRETED, NEW, Case, generate, make_case, prompts

pytest.importorskip("triton")
if not CUDA and not INTERPRETED:
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from tests.fakes.driver import Driver
from tests.fakes.features import FEATURES
from tonle.engine.request import GenerationConfig

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float32] if CUDA else [torch.float32]


@pytest.fixture(scope="module", params=[(name, dtype) for name in FEATURES for dtype in DTYPES],
                ids=lambda param: f"{param[0]}-{str(param[1]).removeprefix('torch.')}")  # fmt: skip
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, dtype = request.param
    return make_case(name, dtype, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module" if CUDA else "function")  # the interpreter's settings are a test's own
def driver(case: Case) -> Iterator[Driver]:
    """Few rows, so that few graphs are captured."""
    yield case.driver(**({"max_batch_size": 24, "max_num_batched_tokens": 256} if CUDA else {}))
    torch.cuda.empty_cache()


def test_one_row(case: Case, driver: Driver) -> None:
    """Prompts longer than any window and than the context before it was stretched; alone, so that all is fused."""
    for prompt in prompts(case, [70, 199] if CUDA else [38], seed=1):
        case.judge(generate(driver, [prompt]))


def test_rows_that_arrive_one_after_another(case: Case, driver: Driver) -> None:
    """Prompts in pieces beside rows that decode; 20 rows are multiplied by another kernel than one, and than a few."""
    asked = prompts(case, [1, 2, 17, 70, 200, 33, 128, 90, 16, 64] * 2 if CUDA else [2, 40], seed=2)
    case.judge(generate(driver, asked, arrive_every=2))


@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter half a minute")
def test_rows_together(case: Case, driver: Driver) -> None:
    """Two rows, five and 24; without log-probabilities, as most requests are, the tokens are the same."""
    for count in (2, 5, 24):
        asked = prompts(case, [40 + 7 * i for i in range(count)], seed=count)
        texts = generate(driver, asked)
        case.judge(texts)
        plain = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
        case.judge(generate(driver, asked, plain))


@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter half a minute")
def test_prompts_are_described(case: Case, driver: Driver) -> None:
    """Log-probabilities of the prompts themselves: every position of a prompt, not the last one alone."""
    wish = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False, logprobs=0, prompt_logprobs=0)
    asked = prompts(case, [90, 150], seed=3)
    first = driver._next + 1
    case.judge(generate(driver, asked, wish))
    for handle, prompt in enumerate(asked, start=first):
        told = [r.logprob for step in driver.steps for r in step.prompt_logprobs.get(handle, (0, []))[1]]
        case.judge_prompt(prompt, told)
