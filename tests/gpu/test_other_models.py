"""On a GPU: models that run through transformers say there what they say alone."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.fakes.driver import Driver
from tests.fakes.other_models import other_model
from tests.parity.test_other_models import GREEDY, assert_greedy, prompts
from tonle.config.engine import EngineConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["gpt2", "cohere2", "deepseek_v3", "falcon", "bloom"])
def test_batched_and_chunked(name: str) -> None:
    model = other_model(name).cuda()
    asked = prompts([1, 17, 60, 200])
    driver = Driver(model, EngineConfig(max_batch_size=5, max_num_batched_tokens=64, max_sequence_length=300))
    for prompt, output in zip(asked, driver.generate(asked, GREEDY, arrive_every=2), strict=True):
        assert_greedy(model, prompt, output)
