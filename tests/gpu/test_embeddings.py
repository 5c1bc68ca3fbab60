"""Embeddings on the CUDA path, judged by transformers in float32: alone, in a crowd, in pieces, beside answers, with adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.cases import CUDA, INTERPRETED, Case, lengths, make_case, prompts

pytest.importorskip("triton")
if not CUDA and not INTERPRETED:
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from tests.fakes.adapters import merge, write_adapter
from tests.fakes.driver import Driver
from tests.fakes.features import FEATURES, rounded
from tests.gpu.cases import SIZES, USUAL
from tests.parity.test_embeddings import expected
from tonle.engine.request import POOLINGS, GenerationConfig
from tonle.engine.run import cuda

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float32] if CUDA else [torch.float32]
NAMES = ["llama3", "window", "head-norms"] if CUDA else ["head-norms"]
FAR = {torch.bfloat16: 0.05, torch.float32: 2e-3}  # most of a vector's length that may be between it and the truth


@pytest.fixture(scope="module", params=[(name, dtype) for name in NAMES for dtype in DTYPES],
                ids=lambda param: f"{param[0]}-{str(param[1]).removeprefix('torch.')}")  # fmt: skip
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, dtype = request.param
    return make_case(name, dtype, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module" if CUDA else "function")  # the interpreter's settings are a test's own
def driver(case: Case) -> Iterator[Driver]:
    yield case.driver(**({"max_batch_size": 64, "max_num_batched_tokens": 256} if CUDA else {}))
    torch.cuda.empty_cache()


def judge(truth: Any, asked: list[list[int]], found: list[np.ndarray], pooling: str, dtype: torch.dtype) -> None:
    for prompt, vector in zip(asked, found, strict=True):
        wanted = expected(truth, prompt, pooling)
        far = np.linalg.norm(vector - wanted) / np.linalg.norm(wanted)
        assert far < FAR[dtype], f"{len(prompt)} tokens, {pooling}: off by {far:.3g}"


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_crowd(case: Case, driver: Driver, pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one token to several steps, in pieces that end inside of them; what is computed alone is the same."""
    monkeypatch.setattr(cuda, "_STATES_AT_ONCE", 96 if CUDA else 16)
    asked = prompts(case, [1, 2, 300, *lengths(40, seed=5)] if CUDA else [1, 41], seed=4)
    found = driver.embed(asked, pooling, arrive_every=0)
    judge(case.truth, asked, found, pooling, case.dtype)
    (alone,) = driver.embed(asked[:1], pooling)
    judge(case.truth, asked[:1], [alone], pooling, case.dtype)


@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter half a minute")
def test_beside_answers(case: Case, driver: Driver) -> None:
    """Rows that decode go on from their tokens as if nothing else were there."""
    wish = GenerationConfig(max_length=48, do_sample=False, early_stopping=False)
    (prompt,) = prompts(case, [60], seed=6)
    (alone,) = driver.generate([prompt], wish)
    answers = [driver.ask(prompt, wish) for _ in range(4)]
    asked = prompts(case, lengths(24, seed=8), seed=7)
    wanted = [driver.ask(each, GenerationConfig(max_length=0)) for each in asked]
    for place, request in enumerate(wanted):
        request.pooling = POOLINGS[place % 2]
    before = len(driver.steps)
    outputs = driver.run([*answers, *wanted], arrive_every=1)
    if case.dtype == torch.float32:
        assert outputs[:4] == [alone] * 4
    found = {handle: data for step in driver.steps[before:] for handle, data in step.embeddings.items()}
    for each, request in zip(asked, wanted, strict=True):
        judge(case.truth, [each], [np.frombuffer(found[request.handle], "<f4")], request.pooling, case.dtype)


@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter half a minute")
def test_with_adapters(tmp_path: Path) -> None:
    name, dtype = "biases", torch.bfloat16
    made = make_case(name, dtype, tmp_path / "model")
    truths: dict[str | None, Any] = {None: made.truth}
    modules = ("q", "k", "v", "o", "gate", "up", "down")
    for seed, own in enumerate(("one", "two")):
        adapter = write_adapter(tmp_path / own, made.reference.spec, rank=4 + 8 * seed, modules=modules, seed=seed)
        truths[own] = merge(rounded(FEATURES[name].model(**SIZES.get(name, USUAL)), dtype, keep=True), adapter)
    lora = {own: str(tmp_path / own) for own in ("one", "two")}
    driver = made.driver(lora=lora, max_loras=2, max_lora_rank=16, max_batch_size=64, max_num_batched_tokens=256)
    asked = prompts(made, [1, 2, *lengths(28, seed=9)], seed=9)
    names = [(None, "one", "two")[place % 3] for place in range(len(asked))]
    for pooling in POOLINGS:
        found = driver.embed(asked, pooling, adapters=names)
        for prompt, own, vector in zip(asked, names, found, strict=True):
            judge(truths[own], [prompt], [vector], pooling, dtype)
