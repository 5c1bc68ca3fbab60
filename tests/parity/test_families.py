"""Every family's truths, on a model of two layers with random weights: the logits and the greedy text of `transformers`, on
torch operations and on the compiled kernels of a CPU, however the work is cut, batched, cached or interrupted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from tests.fakes.checkpoints import FAMILIES, FIRST_FAMILIES, save_gguf, tiny_model
from tests.fakes.driver import Driver
from tests.fakes.features import rounded
from tests.fakes.tiny_families import LONGROPE
from tests.parity.test_engine import GREEDY, TIE, prompts
from tests.parity.test_forward import TOLERANCE, check, reference
from tests.unit.models.stepper import Stepper, random_tokens
from tonle.config.engine import EngineConfig
from tonle.engine.machine import block_bytes
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.open import open_cpu
from tonle.models.cpu.stored import from_gguf
from tonle.models.decoder import Decoder
from tonle.models.load import load
from tonle.models.load.gguf import GGUFWeights
from tonle.models.source import ModelSource, resolve
from tonle.models.weights import tensor_shapes

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [1, 17, 49, 300]
FEW = [1, 60]
GGUF_FAMILIES = ("gemma", "gemma2", "gemma3", "phi3", "granite", "olmo2", "olmo3", "smollm3", "glm", "glm4")


@pytest.fixture(scope="module", params=[family for family in FAMILIES if family not in FIRST_FAMILIES])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def source(model: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return resolve(path)


@pytest.fixture(scope="module")
def decoder(source: ModelSource) -> Decoder:
    return load(source)


@pytest.mark.parametrize("chunk", [1000, 64, 7])
def test_logits_are_those_of_transformers(model: Any, decoder: Decoder, chunk: int) -> None:
    check(decoder, model, lengths=LENGTHS, chunk=chunk)


def test_a_live_model_gives_its_own_logits(model: Any) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check(load(model), model, lengths=FEW, chunk=25)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_rows_of_every_kind_in_one_step(model: Any, decoder: Decoder) -> None:
    asked = [random_tokens(length, model.config.vocab_size) for length in (130, 20, 40, 90)]
    stepper = Stepper(decoder, asked)
    stepper.step({0: 129, 1: 19, 3: 60})
    stepper.step({0: 1, 1: 1, 3: 30, 2: 40})
    for row, prompt in enumerate(asked):
        torch.testing.assert_close(stepper.of(row), reference(model, prompt), **TOLERANCE)


def test_the_compiled_kernels_of_a_cpu(model: Any, tmp_path: Path) -> None:
    """With weights that bfloat16 holds, as those of `test_mutants.py`: kernels for them are compiled once for all."""
    model = rounded(model, torch.bfloat16, keep=True)
    model.save_pretrained(tmp_path)
    fast = open_cpu(resolve(tmp_path))
    assert isinstance(fast, CpuDecoder)
    fast.crossover = sys.maxsize  # also steps that torch would compute faster
    for chunk in (25, 1):
        check(fast, model, lengths=FEW, chunk=chunk)  # type: ignore[arg-type]


def test_half_precision_is_close(model: Any, source: ModelSource) -> None:
    """Not the same rounding as transformers', but as near to the truth."""
    half = load(source, dtype=torch.bfloat16)
    prompt = random_tokens(40, model.config.vocab_size)
    stepper = Stepper(half, [prompt])
    stepper.run(20)
    truth = reference(model, prompt)
    theirs = type(model)(model.config).to(torch.bfloat16).eval()
    theirs.load_state_dict(model.state_dict())
    assert (stepper.of(0) - truth).abs().mean() < 1.5 * (reference(theirs, prompt) - truth).abs().mean() + 1e-3


@torch.inference_mode()
def assert_greedy(model: Any, prompt: list[int], output: list[int]) -> None:
    """Each token is the best one after those before it, by transformers, or one of several equally good ones."""
    logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(output)[:, None]).squeeze(1)
    gap = (logits.amax(-1) - chosen).max().item()
    assert len(output) == GREEDY.max_length and gap < TIE, f"after {len(prompt)} tokens: {gap} below the best"


def test_text_in_an_engine(model: Any) -> None:
    """Alone; in a batch whose prompts are cut into pieces; again, from cached prefixes; again, thrown out and brought back."""
    asked = prompts([1, 17, 100, 300], model.config.vocab_size)
    config = EngineConfig(max_batch_size=4, max_num_batched_tokens=64, max_sequence_length=400)
    driver = Driver(model, config)
    texts = [driver.generate([asked[2]], GREEDY), driver.generate(asked, GREEDY)]
    hits = driver.stats.prefix_hits
    texts.append(driver.generate(asked, GREEDY))
    assert driver.stats.prefix_hits - hits > 300
    per_block = block_bytes(load(model), config, torch.float32)
    tight = Driver(model, EngineConfig(max_sequence_length=400, memory_pool_size=30 * per_block))
    texts.append(tight.generate([*asked, asked[1][::-1], asked[2][::-1]], GREEDY)[: len(asked)])
    assert tight.stats.num_preemptions > 0
    for found in texts:
        for prompt, output in zip(asked[2:3] if len(found) == 1 else asked, found, strict=True):
            assert_greedy(model, prompt, output)
    assert len({token for output in texts[1] for token in output}) > 20, "the model repeats itself: it tells little"


@pytest.mark.parametrize("quant", [Quant.F32, Quant.Q8_0], ids=lambda quant: quant.name)
@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf(family: str, quant: Quant, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = save_gguf(family, path, quant=quant)
    check(load(resolve(path)), model, lengths=FEW, chunk=25)
    file = GGUFWeights(path)
    for name, shape in tensor_shapes(file.spec).items():
        if len(shape) == 2:  # as the CPU's kernels get it, which compute from what is stored
            stored, order = from_gguf(file.stored(name)), file.row_order(name)
            ours = (stored if order is None else stored.take(order)).floats()
            assert np.array_equal(ours, file.fetch(name).float().numpy())


ORIGINAL = 64  # tokens: the context of the model below before it was stretched


@pytest.fixture(scope="module")
def stretched() -> Any:
    return tiny_model("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=ORIGINAL)


def test_the_factors_of_long_contexts(stretched: Any, tmp_path: Path) -> None:
    """transformers takes them for texts that are longer than the original context; an engine for all, if any may be."""
    stretched.save_pretrained(tmp_path / "folder")
    gguf = save_gguf(
        "phi3", tmp_path / "tiny.gguf", rope_parameters=LONGROPE, original_max_position_embeddings=ORIGINAL
    )
    for model, files in ((stretched, tmp_path / "folder"), (gguf, tmp_path / "tiny.gguf"), (stretched, None)):
        place = stretched if files is None else resolve(files)
        short, long = load(place), load(place, context=ORIGINAL + 1)
        assert (short.spec.max_positions, long.spec.max_positions) == (ORIGINAL, 4096)
        check(short, model, lengths=[20, ORIGINAL], chunk=25)
        check(long, model, lengths=[ORIGINAL + 1, 150], chunk=25)
        with pytest.raises(AssertionError, match="not close"):
            check(long, model, lengths=[40])


def test_an_engine_of_long_contexts(stretched: Any) -> None:
    assert Driver(stretched, EngineConfig(max_sequence_length=None)).card.context_length == ORIGINAL
    assert Driver(stretched, EngineConfig(max_sequence_length=ORIGINAL)).card.context_length == ORIGINAL
    driver = Driver(stretched, EngineConfig(max_sequence_length=200))
    assert driver.card.context_length == 200
    (prompt,) = prompts([100], stretched.config.vocab_size)
    assert_greedy(stretched, prompt, driver.generate([prompt], GREEDY)[0])
