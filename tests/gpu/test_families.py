"""On a GPU: models of every family give the tokens and log-probabilities of our eager decoder and of transformers in float32.

One engine for each family, with little memory, so that all its kernels are compiled and its graphs captured once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.cases import CUDA, INTERPRETED, Case, expert_case, family_case, generate, prompts

pytest.importorskip("triton")
if not CUDA and not INTERPRETED:
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from tests.fakes.checkpoints import FAMILIES
from tests.fakes.driver import Driver
from tests.fakes.expert_checkpoints import EXPERT_FAMILIES
from tonle.engine.run.cuda import CudaRunner

pytestmark = pytest.mark.gpu
_BLOCKS = 60  # of the cache: fewer than all rows together need


@pytest.fixture(scope="module", params=[*FAMILIES, *EXPERT_FAMILIES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param in EXPERT_FAMILIES:
        return expert_case(request.param, tmp_path_factory.mktemp("model"))
    return family_case(request.param, torch.bfloat16 if CUDA else torch.float32, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module" if CUDA else "function")  # the interpreter's settings are a test's own
def driver(case: Case) -> Iterator[Driver]:
    spec = case.reference.spec
    pool = 2 * _BLOCKS * 16 * spec.num_layers * spec.kv_size * case.dtype.itemsize
    small = {"max_batch_size": 24, "max_num_batched_tokens": 128, "memory_pool_size": pool} if CUDA else {}
    driver = case.driver(**small)
    assert isinstance(driver.loop._runner, CudaRunner), "the CUDA kernels should run this family"
    yield driver
    torch.cuda.empty_cache()


def test_one_row(case: Case, driver: Driver) -> None:
    """Prompts in chunks of up to 128 tokens, longer than any window."""
    for prompt in prompts(case, [1, 70, 299] if CUDA else [38], seed=1):
        case.judge(generate(driver, [prompt]))


@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter half a minute")
def test_prefix_hits(case: Case, driver: Driver) -> None:
    common = prompts(case, [100], seed=8)[0]
    asked = [common + tail for tail in prompts(case, [3, 20, 47, 60], seed=9)] + [common]
    generate(driver, asked[:1])
    before = driver.stats.prefix_hits
    case.judge(generate(driver, asked))
    assert driver.stats.prefix_hits - before > 300


def test_a_busy_batch(case: Case, driver: Driver) -> None:
    """Prompts beside rows that decode; on a GPU rows are preempted, too, as the cache is too small for all."""
    case.judge(
        generate(driver, prompts(case, [2, 17, 70, 90, 33, 16] * 4 if CUDA else [2, 40], seed=2), arrive_every=1)
    )
    if CUDA:
        assert driver.stats.num_preemptions > 0
