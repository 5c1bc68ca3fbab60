"""Every Python block of the documents runs here, changed as a reader would change it (code_blocks.adapted) and no further.

The documents are not part of the project: `TONLE_SEED_DOCS` names the folder that holds them. The project's own tests of the
same calls are test_inference_engine.py, unit/dynamic_batching, unit/performance_optimizer and unit/inference_optimizer.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.documents.code_blocks import CodeBlock, python_blocks, run_blocks
from tests.fakes.checkpoints import TURN_END, save_folder
from tonle import (
    GenerationConfig,
    InferenceConfig,
    InferenceEngine,
    OptimizationConfig,
    PerformanceOptimizer,
    ResponseCache,
)
from tonle.dynamic_batching import MemoryEstimator
from tonle.inference_optimizer import OptimizedEngine

NUM_BLOCKS = {"001": 19, "002": 11}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("documents") / "your-model"
    save_folder("llama", path)
    # It was never taught to end an answer.
    (path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 16, "eos_token_id": TURN_END}))
    return path


@pytest.fixture
def namespace(folder: Path) -> Iterator[dict[str, Any]]:
    """What the documents use and never define, bound as their prose says. Whatever a block started ends afterwards."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names: dict[str, Any] = {
        "__name__": "documents",
        "torch": torch,
        "model": AutoModelForCausalLM.from_pretrained(folder),
        "tokenizer": tokenizer,
        "input_ids": tokenizer("The capital of France", return_tensors="pt").input_ids,
        "requests": [("a question", 5), ("a longer question", 90), ("another", 7)],
        "memory_estimator": MemoryEstimator(model_hidden_size=64, num_layers=2, num_heads=4),
        "optimization_config": OptimizationConfig(),
        "user_input": "I've been feeling anxious.",
        "GenerationConfig": GenerationConfig,
        "InferenceConfig": InferenceConfig,
        "ResponseCache": ResponseCache,
        "FastAPI": FastAPI,
        "lifespan": _lifespan,
        "alert_ops_team": lambda: None,
    }
    yield names
    for value in list(names.values()):
        if isinstance(value, InferenceEngine):
            value.stop()
        elif isinstance(value, OptimizedEngine | PerformanceOptimizer):
            value.close()


@contextlib.asynccontextmanager
async def _lifespan(_: FastAPI) -> AsyncIterator[None]:
    yield


def blocks_of(number: str) -> list[CodeBlock]:
    folder = os.environ.get("TONLE_SEED_DOCS")
    if not folder:
        pytest.skip("TONLE_SEED_DOCS is not set: it names the folder of the documents whose examples this test runs")
    paths = sorted(Path(folder).glob(f"{number}*"))
    assert len(paths) == 1, f"{folder} has {len(paths)} documents {number}*, not one"
    blocks = list(python_blocks(paths[0]))
    assert len(blocks) == NUM_BLOCKS[number], "blocks were lost, or the document has changed"
    return blocks


@pytest.mark.parametrize("number", ["001", "002"])
def test_every_example_of_a_document_runs(number: str, folder: Path, namespace: dict[str, Any]) -> None:
    run_blocks(blocks_of(number), folder, namespace)


def test_a_block_that_fails_is_named(tmp_path: Path, folder: Path) -> None:
    """The runner itself: order, import paths, functions that a block only defines, and the place of a failure."""
    document = tmp_path / "001_x.txt"
    document.write_text(
        "# A\n```python\nfrom inference.engine import EngineConfig\nconfig = EngineConfig()\n```\n```bash\nfalse\n```\n"
        "```python\nconfig.max_batch_size *= 2\nwide = config.max_batch_size\n```\n"
        "```python\ndef test_it():\n    assert wide == 63\n```\n"
    )
    names: dict[str, Any] = {}
    with pytest.raises(AssertionError) as caught:
        run_blocks(list(python_blocks(document)), folder, names)
    assert names["wide"] == 64
    assert "001_x.txt:14" in caught.value.__notes__[0]
