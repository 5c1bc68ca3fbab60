"""One tiny model, and one engine on it, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.checkpoints import save_folder
from tests.unit.inference_optimizer.engines import CONTEXT, small_engine
from tonle.inference_optimizer import OptimizedEngine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("optimized") / "tiny"
    save_folder("llama", path, max_position_embeddings=CONTEXT)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[OptimizedEngine]:
    with small_engine(folder) as made:
        yield made
