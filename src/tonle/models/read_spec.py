"""`read_spec`: a `ModelSpec` from a model's files.

Does: tell folders from GGUF files. Does not: read weights or need torch. What settings mean: `read_hf.py`, `read_gguf.py`.
"""

from __future__ import annotations

from pathlib import Path

from tonle.config.model_json import read_json
from tonle.errors import ModelError
from tonle.models.config_values import Config, named
from tonle.models.gguf_file import GGUFFile
from tonle.models.read_gguf import from_gguf
from tonle.models.read_hf import from_hf_config
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec

__all__ = ["from_gguf", "from_hf_config", "read_spec"]


def read_spec(source: ModelSource) -> ModelSpec:
    """The spec of the model at `source`. Raises `ModelError` naming the file."""
    if source.kind == "gguf":
        return from_gguf(GGUFFile(source.path))
    config = read_json(source.path / "config.json")
    with named(source.path):
        return from_hf_config(config, _read_generation_config(source.path))


def _read_generation_config(folder: Path) -> Config | None:
    """None if there is none, or one that cannot be read: the engine warns of that when it reads the rest of it."""
    try:
        return read_json(folder / "generation_config.json")
    except ModelError:
        return None
