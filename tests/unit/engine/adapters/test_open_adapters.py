"""Adapters at the start of an engine: where their folders are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.adapters import write_adapter
from tests.fakes.checkpoints import save_folder
from tonle.config.load_settings import load
from tonle.engine.adapters.open_adapters import read_given
from tonle.errors import ModelError
from tonle.models.read_spec import read_spec
from tonle.models.source import resolve


def test_paths_in_a_settings_file_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    file, working = tmp_path / "etc" / "tonle.yaml", tmp_path / "working"
    file.write_text("lora: {khmer-qa: adapters/khmer-qa}\n")
    save_folder("llama", tmp_path / "model")
    spec = read_spec(resolve(tmp_path / "model"))
    written = write_adapter(working / "adapters" / "khmer-qa", spec)
    config = load({}, file=file, environ={}).engine()
    monkeypatch.chdir(working)
    given, whole = read_given(config, spec)
    assert given["khmer-qa"].digest == written.digest
    assert whole.lora == {"khmer-qa": str(working / "adapters" / "khmer-qa")}
    monkeypatch.chdir(file.parent)
    with pytest.raises(ModelError, match=r"adapter khmer-qa cannot be loaded: .*there is no such folder"):
        read_given(config, spec)
