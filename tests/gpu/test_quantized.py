"""On a GPU: an engine whose weights are in few bits says what our eager decoder says with the same few-bit weights.

The eager decoder unpacks them and multiplies with plain torch operations, so a difference is a kernel's, not the quantization's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.gpu.cases import CUDA, Case, family_case, generate, lengths, prompts

pytest.importorskip("triton")
if not CUDA:
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.fakes.driver import Driver
from tests.fakes.truth import Bound
from tonle.engine.run.cuda import CudaRunner
from tonle.models.load import load
from tonle.models.quantize import Quantization

pytestmark = pytest.mark.gpu
# With more than 16 rows e4m3 weights multiply activations that are rounded to e4m3: by 3 % each, which mostly cancel out.
_ROUNDED = Bound(0.25, 1.0)


@pytest.fixture(scope="module", params=["int8", "int4", "fp8"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    plain = family_case("llama", torch.bfloat16, tmp_path_factory.mktemp("model"))
    reference = load(
        plain.source, device=torch.device("cuda"), dtype=torch.bfloat16, quantization=Quantization(request.param)
    )
    return replace(plain, name=request.param, reference=reference, truth=None)


@pytest.fixture(scope="module")
def driver(case: Case) -> Iterator[Driver]:
    driver = case.driver(quantization=case.name, max_num_batched_tokens=512)
    assert isinstance(driver.loop._runner, CudaRunner)
    yield driver
    torch.cuda.empty_cache()


def test_one_row(case: Case, driver: Driver) -> None:
    """Its prompt is short, so that no row is rounded."""
    case.judge(generate(driver, prompts(case, [16], seed=1)))


def test_few_rows(case: Case, driver: Driver) -> None:
    case.judge(generate(driver, prompts(case, [3] * 5, seed=2)))


@pytest.mark.parametrize("count", [20, 60, 100, 256])
def test_many_rows_and_long_prompts(case: Case, driver: Driver, count: int) -> None:
    judged = replace(case, bound=_ROUNDED) if case.name == "fp8" else case
    judged.judge(generate(driver, prompts(case, lengths(count, seed=count), seed=count)))


def test_these_weights_matter(case: Case, driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The reference with the weights of another model is found out, so the bounds above can fail."""
    other = family_case("qwen2", torch.bfloat16, tmp_path_factory.mktemp("other"))
    wrong = replace(case, reference=other.reference, bound=_ROUNDED)
    with pytest.raises(AssertionError):
        wrong.judge(generate(driver, prompts(case, [16], seed=1)))
