"""Adapters on the CUDA path: in any batch, a request with one gets the text and log-probabilities of the merged weights alone.

Judged by transformers in float32 on the CPU, with each adapter merged into a copy of the weights. Also run by
`python -m tests.gpu.mutations`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.cases import CUDA, GREEDY, INTERPRETED, NEW, prompts

pytest.importorskip("triton")
if not CUDA and not INTERPRETED:
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from tests.fakes.adapters import merge, write_adapter
from tests.fakes.truth import BOUNDS, Text, judge, transformers_logits
from tests.gpu.cases import Case, make_case
from tonle.engine import EngineConfig, InferenceEngine
from tonle.engine import build as build_module
from tonle.errors import NotFound

pytestmark = pytest.mark.gpu
BASE = "windows"  # qwen2: adapters add to products that have a bias
DTYPE = torch.bfloat16 if CUDA else torch.float32
TIMEOUT_S = 600.0
# name: rank, modules. Ranks and modules differ, as those of different makers do.
ADAPTERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "all-4": (4, ("q", "k", "v", "o", "gate", "up", "down")),
    "all-16": (16, ("q", "k", "v", "o", "gate", "up", "down")),
    "qv-8": (8, ("q", "v")),
    "mlp-16": (16, ("gate", "up", "down")),
    "o-1": (1, ("o",)),
    "kdown-5": (5, ("k", "down")),
    "all-8": (8, ("q", "k", "v", "o", "gate", "up", "down")),
    "up-16": (16, ("up",)),
}
NAMES = list(ADAPTERS) if CUDA else ["all-4", "qv-8"]
Ask = tuple[str | None, list[int]]  # adapter, prompt


@dataclass
class World:
    """A model, its adapters as folders, and transformers' models with each of them merged; None is the model alone."""

    case: Case
    folders: dict[str, str]
    truths: dict[str | None, Any]

    def config(self, **more: Any) -> EngineConfig:
        usual = {"lora": self.folders, "max_loras": len(NAMES), "max_lora_rank": 16}
        return self.case.config(**{**usual, **({"max_batch_size": 32} if CUDA else {}), **more})

    def engine(self, **more: Any) -> InferenceEngine:
        return InferenceEngine(str(self.case.source.path), None, self.config(**more))

    def judge(self, asked: list[Ask], texts: list[Text]) -> None:
        for name in dict.fromkeys(name for name, _ in asked):
            own = [text for (of, _), text in zip(asked, texts, strict=True) if of == name]
            judge(own, transformers_logits(self.truths[name]), BOUNDS[DTYPE], f"merged weights of {name}")
        different = sum(len(set(text.output)) for text in texts)
        assert len(texts) == 1 or different > 0.2 * NEW * len(texts), "the texts repeat themselves: they tell little"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("adapters")
    case = make_case(BASE, DTYPE, root / "model")
    from tests.fakes.checkpoints import tiny_tokenizer

    tiny_tokenizer().save_pretrained(root / "model")
    folders: dict[str, str] = {}
    truths: dict[str | None, Any] = {None: case.truth}
    for number, name in enumerate(NAMES):
        truths[name] = add_adapter(case, root / name, name, seed=number)
        folders[name] = str(root / name)
    return World(case, folders, truths)


def add_adapter(case: Case, folder: Path, name: str, seed: int) -> Any:
    """Write one; returns the model with it merged. Stored in the precision it is computed in, so that reading rounds nothing."""
    rank, modules = ADAPTERS[name]
    made = write_adapter(
        folder, case.reference.spec, rank=rank, alpha=2 * rank, modules=modules, seed=seed, dtype=DTYPE
    )
    return merge(copy.deepcopy(case.truth), made)


def ask(engine: InferenceEngine, asked: list[Ask]) -> list[Text]:
    """All at once."""
    ids = [engine.submit_request(prompt, GREEDY, adapter=name) for name, prompt in asked]
    texts = []
    for request_id, (_, prompt) in zip(ids, asked, strict=True):
        found = engine.result(request_id, TIMEOUT_S)
        assert found.logprobs is not None and len(found.output_ids[0]) == NEW
        texts.append(Text(prompt, found.output_ids[0], [record.logprob for record in found.logprobs[0]]))
    return texts


def mixed(world: World, rounds: int, longest: int = 200) -> list[Ask]:
    """Every adapter and the model alone, in turns, with prompts of different lengths."""
    names: list[str | None] = [None, *NAMES] * rounds
    lengths = [1 + (37 * i) % longest for i in range(len(names))]
    return list(zip(names, prompts(world.case, lengths, seed=rounds), strict=True))


@pytest.fixture(scope="module" if CUDA else "function")
def engine(world: World) -> Iterator[InferenceEngine]:
    with world.engine() as running:
        yield running
    if CUDA:
        torch.cuda.empty_cache()


def test_adapters_differ(world: World) -> None:
    """From the model and from each other, by far more than rounding: a test that mixed them up could not pass."""
    prompt = prompts(world.case, [30])[0]
    logits = {name: transformers_logits(truth)(prompt)[-1] for name, truth in world.truths.items()}
    for name, own in logits.items():
        for other, theirs in logits.items():
            assert name == other or float((own - theirs).abs().mean() / own.std()) > 2 * BOUNDS[DTYPE].mean


def test_many_adapters_beside_base_rows(world: World, engine: InferenceEngine) -> None:
    asked = mixed(world, rounds=3) if CUDA else mixed(world, rounds=1, longest=20)
    world.judge(asked, ask(engine, asked))


def test_one_row(world: World, engine: InferenceEngine) -> None:
    """Alone, all is fused: with an adapter, without one, with another, and back."""
    for name in [NAMES[0], None, NAMES[1], NAMES[0]] if CUDA else [NAMES[0]]:
        asked: list[Ask] = [(name, prompts(world.case, [70 if CUDA else 9], seed=5)[0])]
        world.judge(asked, ask(engine, asked))


slow = pytest.mark.skipif(INTERPRETED, reason="takes the interpreter minutes")


@slow
@pytest.mark.parametrize("count", [2, 3, 8, 16, 17, 32])
def test_numbers_of_rows(world: World, engine: InferenceEngine, count: int) -> None:
    """Each is multiplied in another way, or padded to another graph; all rows with one adapter, and each with its own."""
    texts = prompts(world.case, [20 + 5 * i for i in range(count)], seed=count)
    for names in ([NAMES[1]] * count, [([None, *NAMES])[i % (len(NAMES) + 1)] for i in range(count)]):
        asked: list[Ask] = list(zip(names, texts, strict=True))
        world.judge(asked, ask(engine, asked))


@slow
def test_without_graphs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs replay is also right where it runs as it is."""
    from tonle.engine.build_cuda import cuda_machine

    monkeypatch.setattr(
        build_module, "_cuda_machine", lambda decoder, config: cuda_machine(decoder, config, capture=False)
    )
    with world.engine() as plain:
        asked = mixed(world, rounds=1)
        world.judge(asked, ask(plain, asked))
        for one in asked:
            world.judge([one], ask(plain, [one]))


@slow
def test_more_adapters_than_slots(world: World) -> None:
    """Slots are loaded again and again; each text is still that of its own adapter."""
    with world.engine(max_loras=2) as running:
        asked = mixed(world, rounds=3)
        world.judge(asked, ask(running, asked))
        world.judge(asked[::-1], ask(running, asked[::-1]))


@slow
def test_prefixes_are_an_adapters_own(world: World) -> None:
    """The same prompt: found again for the same adapter, computed anew for another."""
    prompt = prompts(world.case, [120], seed=7)[0]
    names: list[str | None] = [None, *NAMES]
    with world.engine() as running:
        for repeat in range(2):
            before = running.get_stats()["prompt_tokens"]
            for name in names:
                world.judge([(name, prompt)], ask(running, [(name, prompt)]))
            computed = running.get_stats()["prompt_tokens"] - before
            assert computed == len(names) * (120 if repeat == 0 else 120 - 112)  # seven whole blocks are found


@slow
def test_prompts_in_pieces(world: World) -> None:
    """Beside rows that decode."""
    with world.engine(max_num_batched_tokens=64) as running:
        asked = mixed(world, rounds=3, longest=300)
        world.judge(asked, ask(running, asked))


@slow
def test_replaced_and_unloaded_while_it_runs(world: World, tmp_path: Path) -> None:
    name = NAMES[1]
    prompt = prompts(world.case, [50], seed=9)[0]
    other = add_adapter(world.case, tmp_path / "other", name, seed=99)
    with world.engine() as running:
        world.judge([(name, prompt)], ask(running, [(name, prompt)]))
        running.load_adapter(name, tmp_path / "other", replace=True)
        judge(ask(running, [(name, prompt)]), transformers_logits(other), BOUNDS[DTYPE], "the one loaded in its place")
        running.unload_adapter(name)
        with pytest.raises(NotFound):
            running.submit_request(prompt, GREEDY, adapter=name)
        world.judge([(None, prompt)], ask(running, [(None, prompt)]))
