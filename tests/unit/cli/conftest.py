"""A complete tiny model in a folder, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.checkpoints import save_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_folder("llama", folder)
    return folder
