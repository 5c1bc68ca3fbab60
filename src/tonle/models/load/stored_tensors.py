"""`StoredTensors`: the tensors of a folder's safetensors files, by the names they have there.

Does: find the files, check their headers, read tensors when asked for. Does not: know which tensors a model has (`places.py`),
or what their numbers mean (`quantized/`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from tonle.config.model_json import read_json
from tonle.errors import ModelError
from tonle.models.layers import Weight
from tonle.models.safetensors_file import open_safetensors
from tonle.models.weights import Shape

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = ("F", "BF")  # what types that are floats begin with: F32, F8_E4M3, BF16


class Tensors(Protocol):
    """Tensors by the names a checkpoint has for them."""

    @property
    def shapes(self) -> dict[str, Shape]: ...

    @property
    def integers(self) -> dict[str, str]:
        """The types of those that are no floats, and not packed ones either."""

    def get(self, name: str, expert: int | None = None) -> Weight:
        """Of a tensor that holds all experts, in its first dimension: this one's alone."""


class StoredTensors:
    """Mapped into memory: a tensor's numbers are read from disk when they are used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = [open_safetensors(file) for file in weight_files(folder)]
        self._homes: dict[str, Any] = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping
        self.shapes: dict[str, Shape] = {}
        self.integers: dict[str, str] = {}
        for name, file in self._homes.items():
            header = file.get_slice(name)
            self.shapes[name] = tuple(header.get_shape())
            if not (dtype := str(header.get_dtype())).startswith(_FLOATS):
                self.integers[name] = dtype

    def get(self, name: str, expert: int | None = None) -> torch.Tensor:
        if name not in self._homes:
            raise ModelError(f"{self.folder}: tensor {name} is missing")
        tensor: torch.Tensor = self._homes[name].get_tensor(name)
        return tensor if expert is None else tensor[expert]


def weight_files(folder: Path) -> list[Path]:
    """All that its index names, or the only one."""
    index = folder / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index}: has no weight_map of tensors to files")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.is_file():
                raise ModelError(f"{file}: is named by {_INDEX} but missing")
        return files
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if any(folder.glob("*.bin")):
        raise ModelError(f"{folder}: holds pickled weights (.bin) only; convert them to safetensors")
    raise ModelError(f"{folder}: has neither {_SINGLE} nor {_INDEX}")
