"""Models that run through transformers say the same as transformers alone: batched, chunked, from cached prefixes, preempted."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.fakes.driver import Driver
from tests.fakes.other_models import FLAT, OTHERS, PADDED, other_model
from tests.parity.test_embeddings import assert_pooled
from tonle.config.engine import EngineConfig
from tonle.engine.request import POOLINGS, GenerationConfig
from tonle.models.transformers_decoder import TransformersDecoder, adopt
from tonle.models.transformers_flat import FlatForward
from tonle.models.transformers_padded import PaddedForward

NEW = 24
LENGTHS = [1, 17, 40, 300]
GREEDY = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
TIE = 1e-4  # two logits this close may be ordered either way

pytestmark = pytest.mark.usefixtures("one_thread")


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def assert_greedy(model: Any, prompt: list[int], output: list[int]) -> None:
    """Every token is the likeliest after those before it, by one call of the model itself: so all of them are what it would
    have said token by token."""
    tokens = torch.tensor([prompt + output], device=model.device)
    logits = model(tokens).logits[0, len(prompt) - 1 : -1].float().cpu()
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    gaps = logits.max(dim=1).values - chosen
    assert gaps.max().item() < TIE, f"token {int(gaps.argmax())}, behind by {gaps.max().item()}"


@pytest.fixture(scope="module", params=OTHERS)
def model(request: pytest.FixtureRequest) -> Any:
    return other_model(request.param)


def block_bytes(model: Any) -> int:
    spec = adopt(model).spec
    return 2 * spec.num_layers * 16 * spec.num_kv_heads * spec.head_dim * 4


def test_batched_chunked_and_from_a_cached_prefix(model: Any) -> None:
    asked = prompts(LENGTHS)
    driver = Driver(model, EngineConfig(max_batch_size=3, max_num_batched_tokens=96, max_sequence_length=400))
    outputs = driver.generate(asked, GREEDY, arrive_every=2)
    for prompt, output in zip(asked, outputs, strict=True):
        assert_greedy(model, prompt, output)
    assert len({token for output in outputs for token in output}) > NEW // 2  # it does not repeat itself
    before = driver.stats.prefix_hits
    assert driver.generate([asked[-1], asked[2]], GREEDY) == [outputs[-1], outputs[2]]
    assert driver.stats.prefix_hits - before > 300


@pytest.mark.parametrize("name", ["gpt2", "cohere2", "falcon", "bloom"])
def test_equal_prompts_share_blocks_within_a_step_and_rows_are_preempted(name: str) -> None:
    model = other_model(name)
    prompt, *others = prompts([70, 30, 9], seed=5)
    config = EngineConfig(
        max_sequence_length=160, max_num_batched_tokens=96, memory_pool_size=12 * block_bytes(model), max_batch_size=6
    )
    driver = Driver(model, config)
    # Of the first, 48 tokens are computed in the first step; the third has one more than those, and rows with one come first.
    asked = [prompt, prompt, [*prompt[:48], 7], *others]
    outputs = driver.generate(asked, GREEDY)
    for each, output in zip(asked, outputs, strict=True):
        assert_greedy(model, each, output)
    assert driver.stats.num_preemptions > 0 and driver.stats.prefix_hits > 0


@pytest.mark.parametrize(("names", "form"), [(FLAT, FlatForward), (PADDED, PaddedForward)], ids=["flat", "padded"])
def test_the_way_they_run(names: dict[str, Any], form: type) -> None:
    for name in names:
        decoder = adopt(other_model(name))
        assert isinstance(decoder, TransformersDecoder) and isinstance(decoder._forward, form), name


@pytest.mark.parametrize("name", ["opt", "bloom"])
def test_embeddings_are_pooled_hidden_states(name: str) -> None:
    model = other_model(name)
    asked = prompts([1, 20, 9, 50])
    driver = Driver(model, EngineConfig(max_num_batched_tokens=16))
    for pooling in POOLINGS:
        assert_pooled(model, asked, driver.embed(asked, pooling), pooling)


def test_the_owner_can_go_on_using_a_live_model() -> None:
    model = other_model("gpt2")
    before = model(torch.tensor([[5, 6, 7]])).logits
    Driver(model, EngineConfig(max_sequence_length=64)).generate([[5, 6, 7]], GREEDY)
    torch.testing.assert_close(model(torch.tensor([[5, 6, 7]])).logits, before)
    assert model.config._attn_implementation == "sdpa"
