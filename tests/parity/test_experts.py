"""Mixtures of experts say what transformers says, from folders, GGUF files and live models, however the work is cut, batched,
cached or interrupted; and so does the compiled CPU step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from tests.fakes.cpu_models import RandomModel
from tests.fakes.driver import Driver
from tests.fakes.expert_checkpoints import (
    EXPERT_FAMILIES,
    save_experts,
    save_experts_gguf,
    save_mxfp4,
    split_experts,
    tiny_experts,
)
from tests.parity.test_engine import GREEDY, NEW, TIE, assert_same, prompts
from tests.parity.test_forward import TOLERANCE, check, reference
from tests.unit.models.stepper import Stepper, random_tokens
from tonle.config.engine import EngineConfig
from tonle.models.cpu.pack import why_not
from tonle.models.cpu.team import Team
from tonle.models.decoder import Decoder
from tonle.models.load import load
from tonle.models.load.places import places
from tonle.models.source import resolve
from tonle.models.weights import tensor_shapes

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [1, 2, 17, 49, 100, 300]


@pytest.fixture(scope="module", params=EXPERT_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(family)


@pytest.fixture(scope="module")
def model(family: str, folder: Path) -> Any:
    return save_experts(family, folder)


@pytest.fixture(scope="module")
def decoder(model: Any, folder: Path) -> Decoder:
    return load(resolve(folder))


@pytest.mark.parametrize("chunk", [1000, 7])
def test_logits_are_those_of_transformers(model: Any, decoder: Decoder, chunk: int) -> None:
    check(decoder, model, lengths=LENGTHS, chunk=chunk)


def test_a_live_model_gives_its_own_logits(model: Any) -> None:
    check(load(model), model, lengths=[1, 17, 60], chunk=40)


def test_mixed_rows_in_one_step(model: Any, decoder: Decoder) -> None:
    asked = [random_tokens(length, model.config.vocab_size) for length in (160, 20, 40, 90)]
    stepper = Stepper(decoder, asked)
    stepper.step({0: 159, 1: 19, 3: 60})
    stepper.step({0: 1, 1: 1, 3: 30, 2: 40})
    for row, prompt in enumerate(asked):
        torch.testing.assert_close(stepper.of(row), reference(model, prompt), **TOLERANCE)


class _Stored(RandomModel):
    """A live model's numbers in the stored formats of `RandomModel`; the model gets the values as stored."""

    def __init__(self, model: Any) -> None:
        self.spec, self._all_four_bits = load(model).spec, False
        tensors = model.state_dict()
        where = places(self.spec, tensors)
        views = {name: place.of(tensors[place.stored]) for name, place in where.items()}
        self._vectors = {name: view for name, view in views.items() if view.dim() == 1}
        self._stored = {name: self._store(name, view.contiguous()) for name, view in views.items() if view.dim() == 2}
        for name, stored in self._stored.items():
            views[name].copy_(torch.from_numpy(stored.floats()))


@torch.no_grad()
def test_the_compiled_cpu_step(family: str) -> None:
    model = tiny_experts(family)
    stored = _Stored(model)
    assert why_not(stored.spec) is None
    fast = stored.fast(team=Team(2))
    asked = [random_tokens(length, model.config.vocab_size) for length in (60, 1, 33)]
    for chunk in (1000, 7):
        stepper = Stepper(fast, asked)  # type: ignore[arg-type]
        stepper.run(chunk)
        for row, prompt in enumerate(asked):
            expected = reference(model, prompt)
            assert float((stepper.of(row) - expected).norm() / expected.norm()) < 1e-3


# -- the engine


@pytest.fixture(scope="module")
def answers(model: Any) -> list[tuple[list[int], list[int]]]:
    """What the engine says to each prompt alone: at every token what transformers finds best."""
    driver = Driver(model, EngineConfig(max_sequence_length=400))
    found = []
    for prompt in prompts([1, 17, 100, 300], model.config.vocab_size):
        said = driver.generate([prompt], GREEDY)[0]
        assert len(said) == NEW
        logits = reference(model, prompt + said)[len(prompt) - 1 : -1]
        behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(said)[:, None])[:, 0]
        assert behind.max() < TIE, f"token {int(behind.argmax())} of prompt {len(prompt)} is not the best"
        found.append((prompt, said))
    return found


def test_in_a_busy_batch(model: Any, answers: Any) -> None:
    driver = Driver(model, EngineConfig(max_batch_size=32, max_sequence_length=400))
    others = prompts([5, 60, 120, 9], model.config.vocab_size, seed=9)
    outputs = driver.generate([prompt for prompt, _ in answers] + others, GREEDY, arrive_every=2)
    for (prompt, alone), ours in zip(answers, outputs[: len(answers)], strict=True):
        assert_same(model, prompt, ours, alone)


def test_chunked_and_preempted(model: Any, answers: Any) -> None:
    """Room for little more than the longest request; prompts in pieces of 24 tokens at most."""
    spec = load(model).spec
    block_bytes = 2 * spec.num_layers * 16 * spec.kv_size * 4
    config = EngineConfig(max_batch_size=8, max_num_batched_tokens=24, max_sequence_length=400,
                          memory_pool_size=26 * block_bytes)  # fmt: skip
    driver = Driver(model, config)
    others = prompts([60, 70, 80, 90], model.config.vocab_size, seed=9)
    outputs = driver.generate(others + [prompt for prompt, _ in answers], GREEDY)
    for (prompt, alone), ours in zip(answers, outputs[len(others) :], strict=True):
        assert_same(model, prompt, ours, alone)
    assert driver.stats.num_preemptions > 0


def test_a_prefix_hit_is_cold(model: Any, answers: Any) -> None:
    driver = Driver(model, EngineConfig(max_sequence_length=400))
    for _ in range(2):
        outputs = driver.generate([prompt for prompt, _ in answers[2:]], GREEDY)
        for (prompt, alone), ours in zip(answers[2:], outputs, strict=True):
            assert_same(model, prompt, ours, alone)
    assert driver.stats.prefix_hits > 300


# -- files


def test_a_folder_and_its_live_model_agree(model: Any, decoder: Decoder) -> None:
    spec = load(model).spec
    assert spec.layers == decoder.spec.layers and tensor_shapes(spec) == tensor_shapes(decoder.spec)


# without what the format has no words for
IN_GGUF: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None}, "qwen2moe": {"mlp_only_layers": []}, "qwen3moe": {"norm_topk_prob": True},
    "gpt-oss": {"swiglu_limit": 7.0},
}  # fmt: skip


@pytest.mark.parametrize("quant", [Quant.F32, Quant.Q8_0], ids=lambda quant: quant.name)
def test_gguf(family: str, quant: Quant, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = save_experts_gguf(family, path, quant=quant, **IN_GGUF.get(family, {}))
    check(load(resolve(path)), model, lengths=[1, 60], chunk=25)


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path)
    check(load(resolve(tmp_path)), model, lengths=[1, 60], chunk=25)
    path = tmp_path / "tiny.gguf"
    model = save_experts_gguf("gpt-oss", path, quant=Quant.MXFP4, **IN_GGUF["gpt-oss"])
    check(load(resolve(path)), model, lengths=[60], chunk=25)


# -- the tests see


def _without(part: str) -> Any:
    def change(family: str, model: Any) -> None:
        chosen = [tensor for name, tensor in split_experts(family, model).items() if part in name]
        assert chosen, f"{family} has no tensor {part}"
        for tensor in chosen:
            tensor.zero_()

    return change


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("mixtral", "mlp.gate."), ("mixtral", "experts.up_proj"), ("qwen2moe", "shared_expert_gate"),
        ("qwen2moe", "shared_expert.down_proj"), ("qwen3moe", "mlp.gate."), ("olmoe", "experts.gate_proj"),
        ("gpt-oss", "sinks"), ("gpt-oss", "router.bias"), ("gpt-oss", "gate_proj.bias"), ("gpt-oss", "down_proj.bias"),
    ],
)  # fmt: skip
def test_a_part_that_is_forgotten_is_seen(family: str, part: str) -> None:
    """A model without one of its parts is further from the model than the comparison above allows."""
    model, other = tiny_experts(family), tiny_experts(family)
    with torch.no_grad():
        _without(part)(family, other)
    with pytest.raises(AssertionError, match="not close"):
        check(load(other), model, lengths=[60])


@pytest.mark.parametrize(
    ("family", "change"),
    [("qwen2moe", {"norm_topk_prob": True}), ("qwen3moe", {"norm_topk_prob": False}), ("gpt-oss", {"swiglu_limit": 7.0}),
     ("gpt-oss", {"sliding_window": 200}), ("mixtral", {"sliding_window": None}), ("olmoe", {"norm_topk_prob": True})],
)  # fmt: skip
def test_a_setting_that_is_ignored_is_seen(family: str, change: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="not close"):
        check(load(tiny_experts(family, **change)), tiny_experts(family), lengths=[60])
