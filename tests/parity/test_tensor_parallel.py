"""A model that is divided between ranks says what the whole one says, however the work is cut, batched, cached or interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from tests.fakes.adapters import write_adapter
from tests.fakes.checkpoints import save_folder, save_gguf
from tests.fakes.driver import Driver
from tests.fakes.expert_checkpoints import save_experts
from tests.fakes.quantized_checkpoints import save_quantized
from tests.fakes.rank_threads import parallel
from tests.parity.test_engine import TIE, prompts
from tests.unit.models.stepper import Stepper
from tonle.config.engine import EngineConfig
from tonle.engine.request import GenerationConfig
from tonle.models.adapters import Adapter
from tonle.models.decoder import Decoder
from tonle.models.load import load
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource, resolve

NEW = 16
GREEDY = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
PROMPTS = prompts([1, 16, 40, 100], 320)


@dataclass
class Whole:
    """A model on one device, and what it says."""

    source: ModelSource
    decoder: Decoder
    answers: list[list[int]]

    @classmethod
    def of(cls, source: ModelSource) -> Whole:
        driver = Driver(source, EngineConfig(device="cpu", dtype="float32", max_sequence_length=256))
        return cls(source, load(source), driver.generate(PROMPTS, GREEDY))

    def check(self, outputs: list[list[int]]) -> None:
        for prompt, ours, whole in zip(PROMPTS, outputs, self.answers, strict=True):
            assert_same(self.decoder, prompt, ours, whole)


def assert_same(
    decoder: Decoder, prompt: list[int], ours: list[int], whole: list[int], slot: int | None = None
) -> None:
    """Equal, or different first where the whole model itself sees a tie."""
    if ours == whole:
        return
    at = next(i for i, (a, b) in enumerate(zip(ours, whole, strict=True)) if a != b)
    stepper = Stepper(decoder, [prompt + whole[:at]], adapter_slots=None if slot is None else [slot])
    stepper.run(chunk=1000)
    logits = stepper.of(0)[-1]
    gap = (logits[whole[at]] - logits[ours[at]]).item()
    assert abs(gap) < TIE, f"token {at}: divided {ours[at]}, whole {whole[at]}, gap {gap}"


def _written(write: Callable[..., Any], *args: Any, **settings: Any) -> Callable[[Path], ModelSource]:
    def source(path: Path) -> ModelSource:
        write(args[0], path, *args[1:], **settings)
        return resolve(path)

    return source


EIGHT = {"num_local_experts": 8}
MODELS: dict[str, tuple[Callable[[Path], ModelSource], tuple[int, ...]]] = {
    # Two key-value heads: with four ranks, two of them have the same one.
    "llama": (_written(save_folder, "llama"), (2, 4)),
    # Biases; tied embeddings; a vocabulary that two can divide and four cannot.
    "biases": (_written(save_folder, "qwen2", vocab_size=322), (2, 4)),
    "norms over all heads": (_written(save_folder, "olmo2"), (4,)),
    "residual scale": (_written(save_folder, "granite"), (2,)),
    "experts": (_written(save_experts, "mixtral", **EIGHT), (2, 4)),
    "shared experts": (_written(save_experts, "qwen2moe", num_experts=8), (2,)),
    "experts with biases, sinks": (_written(save_experts, "gpt-oss", **EIGHT), (4,)),
    "4-bit groups": (_written(save_quantized, "llama", "awq", intermediate_size=128), (2,)),
    "8-bit outputs": (_written(save_quantized, "qwen2", "compressed int8"), (2,)),
    "gguf": (_written(lambda family, path, **how: save_gguf(family, path.with_suffix(".gguf"), **how) and
                      path.with_suffix(".gguf").rename(path), "llama", quant=Quant.Q8_0), (2,)),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Whole, tuple[int, ...]]:
    make, sizes = MODELS[request.param]
    return Whole.of(make(tmp_path_factory.mktemp("models") / "model.gguf" if request.param == "gguf" else
                         tmp_path_factory.mktemp("models") / "model")), sizes  # fmt: skip


def test_it_says_the_same_in_a_busy_batch(model: tuple[Whole, tuple[int, ...]]) -> None:
    whole, sizes = model
    for size in sizes:
        with parallel(whole.source, size, max_sequence_length=256) as driver:
            whole.check(driver.generate(PROMPTS, GREEDY, arrive_every=2))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    path = tmp_path_factory.mktemp("models") / "llama"
    save_folder("llama", path)
    return Whole.of(resolve(path))


@pytest.fixture(scope="module", params=[2, 4])
def narrow(llama: Whole, request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Little of everything: prompts are cut into chunks, and not all of them fit the cache."""
    spec = read_spec(llama.source)
    num_kv_heads = max(1, spec.num_kv_heads // request.param)
    block_bytes = 2 * spec.num_layers * 16 * num_kv_heads * spec.head_dim * 4  # of one rank
    with parallel(
        llama.source, request.param, max_num_batched_tokens=24, max_batch_size=4, max_sequence_length=256,
        memory_pool_size=9 * block_bytes,
    ) as driver:  # fmt: skip
        yield driver


def test_chunked_and_preempted(llama: Whole, narrow: Driver) -> None:
    crowd = prompts([40, 44, 47, 39, 90], 320, seed=1)
    alone = Driver(llama.source, EngineConfig(device="cpu", dtype="float32", max_sequence_length=256))
    expected = alone.generate(crowd, GREEDY)
    for prompt, ours, theirs in zip(crowd, narrow.generate(crowd, GREEDY), expected, strict=True):
        assert_same(llama.decoder, prompt, ours, theirs)
    assert narrow.stats.num_preemptions > 0
    assert narrow.card.num_blocks == 9


def test_a_prefix_hit_is_cold(llama: Whole, narrow: Driver) -> None:
    longest, answer = PROMPTS[-1], llama.answers[-1]
    narrow.generate([longest], GREEDY)
    before = narrow.stats.prefix_hits
    assert_same(llama.decoder, longest, narrow.generate([longest], GREEDY)[0], answer)
    assert narrow.stats.prefix_hits - before >= 80


def test_embeddings_are_of_the_whole_model(llama: Whole) -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_sequence_length": 256}
    expected = Driver(llama.source, EngineConfig(**settings)).embed(PROMPTS, "mean")
    with parallel(llama.source, 2, max_sequence_length=256) as driver:
        for ours, theirs in zip(driver.embed(PROMPTS, "mean"), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_keys_and_values_of_eight_bits(llama: Whole) -> None:
    settings: dict[str, Any] = {"kv_cache_dtype": "int8", "max_sequence_length": 256}
    expected = Driver(llama.source, EngineConfig(device="cpu", dtype="float32", **settings)).generate(PROMPTS, GREEDY)
    with parallel(llama.source, 2, **settings) as driver:
        outputs = driver.generate(PROMPTS, GREEDY)
    same = sum(ours == theirs for ours, theirs in zip(outputs, expected, strict=True))
    assert same >= 3, "a number at the edge may be rounded either way"


@pytest.mark.parametrize("size", [2, 4])
def test_adapters_are_divided_as_their_matrices(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model"
    save_folder("qwen2", path, tie_word_embeddings=False)
    source, spec = resolve(path), read_spec(resolve(path))
    adapters: dict[str | None, Adapter | None] = {
        None: None,
        "all": write_adapter(tmp_path / "all", spec, rank=3),
        "some": write_adapter(tmp_path / "some", spec, rank=2, modules=("v", "o", "down"), seed=1),
    }
    lora = {"all": str(tmp_path / "all")}
    names = [None, "all", "some", "all"]
    whole = load(source)
    whole.enable_adapters(2, 4)
    for slot, name in enumerate(("all", "some")):
        whole.set_adapter(slot, adapters[name])
    with parallel(source, size, lora=lora, enable_lora=True, max_loras=2, max_sequence_length=256) as driver:
        assert driver.load("some", str(tmp_path / "some")).error is None
        outputs = driver.generate(PROMPTS, GREEDY, adapters=names, arrive_every=2)
    settings = EngineConfig(
        lora=lora, enable_lora=True, max_loras=2, max_sequence_length=256, dtype="float32", device="cpu"
    )
    alone = Driver(source, settings)
    assert alone.load("some", str(tmp_path / "some")).error is None
    expected = alone.generate(PROMPTS, GREEDY, adapters=names)
    slots = {None: -1, "all": 0, "some": 1}
    for prompt, name, ours, theirs in zip(PROMPTS, names, outputs, expected, strict=True):
        assert_same(whole, prompt, ours, theirs, slots[name])
    assert (
        len({tuple(tokens) for tokens in alone.generate([PROMPTS[2]] * 3, GREEDY, adapters=[None, "all", "some"])}) == 3
    )


def test_weights_made_small_as_they_are_loaded(llama: Whole) -> None:
    settings: dict[str, Any] = {"quantization": "int8", "quantization_group_size": 0, "max_sequence_length": 256}
    expected = Driver(llama.source, EngineConfig(device="cpu", dtype="float32", **settings)).generate(PROMPTS, GREEDY)
    with parallel(llama.source, 4, **settings) as driver:
        outputs = driver.generate(PROMPTS, GREEDY)
    assert outputs == expected, "the same numbers, whoever holds them"


def test_random_weights_are_those_of_the_whole(llama: Whole) -> None:
    settings: dict[str, Any] = {"load_format": "random", "max_sequence_length": 256}
    expected = Driver(llama.source, EngineConfig(device="cpu", dtype="float32", **settings)).generate(PROMPTS, GREEDY)
    with parallel(llama.source, 2, **settings) as driver:
        assert driver.generate(PROMPTS, GREEDY) == expected


def test_a_rank_holds_a_part(llama: Whole) -> None:
    """Memory is what several devices are for."""
    with parallel(llama.source, 2, max_sequence_length=256) as driver:
        own = driver.loop._runner._model._own
        whole, part = load(llama.source).weights.layers[0], own.weights.layers[0]
        for name in ("qkv", "o", "gate_up", "down"):
            sizes = [sum(each.weight.numel() for each in getattr(layer, name).parts) for layer in (whole, part)]
            assert sizes[1] == sizes[0] // 2, name
        assert torch.equal(own.weights.embedding, llama.decoder.weights.embedding)
        assert own.weights.lm_head.parts[0].num_outputs == 160
