"""`read_adapter`: a LoRA adapter from a PEFT folder (adapter_config.json and adapter_model.safetensors).

Does: check names, shapes and numbers of all tensors against the model, fold the scaling into B, part what an adapter adds to
matrices that the model's checkpoints join, compute the digest. Does not: fetch anything, run pickles, or open any path that the
files name.

The folder's files may be links to elsewhere (the hub's cache is made of such links): who may name a folder may read it.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from tonle.config.adapter_names import DOWNLOAD
from tonle.errors import ModelError
from tonle.models.adapters.adapter import MAX_RANK, MODULE_PATHS, Adapter, AdapterPart, digest_of
from tonle.models.adapters.adapter_config import MERGE, AdapterConfig, shown
from tonle.models.load.places import Place, places
from tonle.models.safetensors_file import header_bytes, open_safetensors
from tonle.models.spec import ModelSpec
from tonle.models.weights import tensor_shapes

log = logging.getLogger("tonle.models")

_CONFIG, _WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?:model\.)?layers\.(\d{1,9})\.(.+)\.lora_([AB])(?:\.[\w-]+)?\.weight")
_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_MAX_HEADER_BYTES = 16 * 2**20
_AGAIN = "save or copy the adapter again"
# What other kinds of tensors mean, by a piece of their names.
_OTHER_TENSORS = {
    "lora_magnitude_vector": "it belongs to a DoRA adapter, and these are not supported",
    "lora_embedding_": "adapters of embeddings are not supported",
    "embed_tokens": "adapters of embeddings are not supported",
    "lm_head": "adapters of lm_head are not supported",
    "trainable_tokens": "trained embeddings of single tokens are not supported",
    "modules_to_save": "whole modules saved with an adapter are not supported",
    "bias": "biases are not supported",
}

Module = tuple[int, str]  # layer, one of MODULE_PATHS
StoredModule = tuple[int, str]  # layer, what stands after model.layers.N. in the names of checkpoints
Shape = tuple[int, ...]


def read_adapter(path: Path, spec: ModelSpec, *, max_rank: int) -> Adapter:
    """The adapter in the folder `path`, for the model of `spec`. Raises `ModelError` naming the file and the tensor or setting.

    `max_rank` is the setting max_lora_rank: ranks beyond it are refused.
    """
    folder = expand(path)
    try:
        _check_folder(folder)
        config = AdapterConfig(_file(folder, _CONFIG))
        adapter = _WeightsFile(_file(folder, _WEIGHTS), config, spec).read(max_rank)
    except OSError as error:
        raise ModelError(f"{shown(str(folder))}: cannot be read: {error.strerror or error}") from error
    if config.base_model is not None:
        log.info("the adapter at %s was made for %s", folder, shown(config.base_model))
    return adapter


def matrix_shapes(spec: ModelSpec) -> dict[Module, tuple[int, int]]:
    """(out, in) of every matrix that an adapter may change."""
    shapes = tensor_shapes(spec)
    found: dict[Module, tuple[int, int]] = {}
    for layer in range(spec.num_layers):
        for module, path in MODULE_PATHS.items():
            shape = shapes.get(f"model.layers.{layer}.{path}.weight")
            if shape is not None and len(shape) == 2:
                found[layer, module] = (shape[0], shape[1])
    return found


@dataclass(slots=True)
class _Target:
    """A matrix as the model's checkpoints have it, and those of ours that stand in it: one, or several side by side."""

    rows: int = 0
    columns: int = 0
    places: dict[str, Place] = field(default_factory=dict)  # by module


def _targets(spec: ModelSpec) -> dict[StoredModule, _Target]:
    """Every matrix that an adapter may change, by what an adapter calls it."""
    where = places(spec, ())
    found: dict[StoredModule, _Target] = {}
    for (layer, module), (rows, columns) in matrix_shapes(spec).items():
        prefix = f"model.layers.{layer}."
        place = where[f"{prefix}{MODULE_PATHS[module]}.weight"]
        target = found.setdefault((layer, place.stored.removeprefix(prefix).removesuffix(".weight")), _Target())
        target.rows, target.columns = target.rows + rows, columns
        target.places[module] = place
    return found


def expand(path: str | os.PathLike[str]) -> Path:
    """With the home folder in place of a `~`; the home of a user that does not exist is left for the reader to miss."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (pathlib's raises)


def _check_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    wanted = f"an adapter is a local folder with {_CONFIG} and {_WEIGHTS}"
    if folder.exists():
        raise ModelError(f"{shown(str(folder))}: is not a folder; {wanted}")
    raise ModelError(f"{shown(str(folder))}: there is no such folder; {wanted}; {DOWNLOAD}")


def _file(folder: Path, name: str) -> Path:
    if (folder / name).is_file():
        return folder / name
    if name == _WEIGHTS and (folder / _PICKLE).exists():
        raise ModelError(
            f"{folder / _PICKLE}: pickled weights are not read, since they can run code; "
            f"save the adapter as {_WEIGHTS} (safe_serialization=True of peft's save_pretrained)"
        )
    if (folder / "config.json").is_file():
        raise ModelError(f"{folder}: is a model, not an adapter: it has no {name}")
    raise ModelError(f"{folder}: is not an adapter: it has no {name}")


def _open(file: Path) -> Any:
    try:
        return open_safetensors(file)
    except ModelError as error:
        if isinstance(error.__cause__, SafetensorError):  # truncated or damaged; a file that may not be read is neither
            raise ModelError(f"{error.message}; {_AGAIN}") from error
        raise


def _stored_shapes(file: Path) -> dict[str, Shape]:
    """By name. Only the header is read."""
    size = header_bytes(file)
    if _MAX_HEADER_BYTES < size < file.stat().st_size:
        raise ModelError(f"{file}: its header has {size} bytes; an adapter's has at most {_MAX_HEADER_BYTES}")
    opened = _open(file)
    shapes: dict[str, Shape] = {}
    for name in opened.keys():  # noqa: SIM118 - not a mapping
        tensor = opened.get_slice(name)
        if tensor.get_dtype() not in _DTYPES:
            raise ModelError(
                f"{file}: tensor {shown(name)} has type {tensor.get_dtype()}, not one of: {', '.join(_DTYPES)}"
            )
        shapes[name] = tuple(tensor.get_shape())
    if not shapes:
        raise ModelError(f"{file}: holds no tensors; {_AGAIN}")
    return shapes


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix that the adapter changes: the names of its tensors in the file, and what they should be."""

    a: str
    b: str
    rank: int
    scaling: float


class _WeightsFile:
    """adapter_model.safetensors. Everything is checked before any number is read."""

    def __init__(self, file: Path, config: AdapterConfig, spec: ModelSpec) -> None:
        self._file = file
        self._config = config
        self._num_layers = spec.num_layers
        self._wanted = _targets(spec)
        self._paths = tuple(dict.fromkeys(path for _, path in self._wanted))

    def read(self, max_rank: int) -> Adapter:
        found = _stored_shapes(self._file)
        self._check_layers(found)
        matrices, without = self._arrange(found)
        self._check_shapes(matrices, found)
        self._check_rank(matrices, max_rank)
        tensors = self._read_tensors(found)
        parts: dict[Module, AdapterPart] = {}
        for (layer, path), matrix in matrices.items():
            a = self._finite(matrix.a, tensors[matrix.a], 1.0)
            b = self._finite(matrix.b, tensors[matrix.b], matrix.scaling)
            for module, place in self._wanted[layer, path].places.items():
                parts[layer, module] = AdapterPart(a, place.of(b))
        if without:
            log.warning("%s: no tensors for %d of the modules that %s targets (the first: %s); they stay as they are",
                        self._file, len(without), _CONFIG, without[0])  # fmt: skip
        return Adapter(digest_of(parts), parts)

    def _check_layers(self, names: Iterable[str]) -> None:
        matches = [match for name in sorted(names) if (match := _TENSOR.fullmatch(name)) and match[2] in self._paths]
        last = max(matches, key=lambda match: int(match[1]), default=None)
        if last is not None and int(last[1]) >= self._num_layers:
            base = self._config.base_model
            raise self._error(
                last[0],
                f"is for layer {int(last[1])}, but the model's last one is {self._num_layers - 1}; the adapter was made for "
                f"another model, of at least {int(last[1]) + 1} layers{f': {shown(base)}' if base else ''}",
            )

    def _arrange(self, names: Iterable[str]) -> tuple[dict[StoredModule, _Matrix], list[str]]:
        """Every tensor at its place: no other kinds, none twice, no A without its B. Also the targeted modules without any."""
        sides: dict[str, dict[StoredModule, str]] = {"A": {}, "B": {}}
        for name in sorted(names):
            place, side = self._place(name)
            if place in sides[side]:
                raise self._error(sides[side][place], f"is for the same matrix as {shown(name)}; keep one of them")
            sides[side][place] = name
        for side, other in (("A", "B"), ("B", "A")):
            for place in sides[side].keys() - sides[other].keys():
                raise self._error(sides[side][place], f"has no lora_{other} beside it; {_AGAIN}")
        matrices: dict[StoredModule, _Matrix] = {}
        without: list[str] = []
        for place in self._wanted:
            layer, path = place[0], f"model.layers.{place[0]}.{place[1]}"
            targeted, present = self._config.targets(path, layer), place in sides["A"]
            if present and not targeted:
                raise self._error(sides["A"][place], f"is for a module that {_CONFIG} does not target")
            if present:
                rank, scaling = self._config.rank(path), self._config.scaling(path)
                matrices[place] = _Matrix(sides["A"][place], sides["B"][place], rank, scaling)
            elif targeted and self._config.says_targets:
                without.append(path)
        return matrices, without

    def _place(self, name: str) -> tuple[StoredModule, str]:
        """The tensor's layer and module, and whether it is A or B."""
        match = _TENSOR.fullmatch(name)
        if match is not None and (int(match[1]), match[2]) in self._wanted:
            return (int(match[1]), match[2]), match[3]
        for piece, reason in _OTHER_TENSORS.items():
            if piece in name:
                raise self._error(name, f"cannot be used: {reason}; {MERGE}")
        modules = ", ".join(path.rpartition(".")[2] for path in self._paths)
        raise self._error(name, f"changes no matrix that an adapter may change in this model; it may change {modules}")

    def _check_shapes(self, matrices: dict[StoredModule, _Matrix], found: dict[str, Shape]) -> None:
        for place, matrix in matrices.items():
            out_size, in_size = self._wanted[place].rows, self._wanted[place].columns
            for name, wanted in ((matrix.a, (matrix.rank, in_size)), (matrix.b, (out_size, matrix.rank))):
                if found[name] != wanted:
                    raise self._error(
                        name,
                        f"has shape {found[name]}, wanted {wanted}: the rank is {matrix.rank} by {_CONFIG}, "
                        f"and the model's matrix is {(out_size, in_size)}{self._made_for()}",
                    )

    def _check_rank(self, matrices: dict[StoredModule, _Matrix], max_rank: int) -> None:
        largest = max(matrices.values(), key=lambda matrix: matrix.rank)
        if largest.rank > max_rank:
            raise self._error(
                largest.a,
                f"has rank {largest.rank}, but adapters may have ranks up to {max_rank} here; "
                f"start with --max-lora-rank {largest.rank} (max_lora_rank in Python and in files), {MAX_RANK} at most",
            )

    def _read_tensors(self, found: dict[str, Shape]) -> dict[str, torch.Tensor]:
        """The file as a whole, not mapped memory: a mapped file that another program cuts short kills its reader."""
        try:
            tensors = load(self._file.read_bytes())
        except SafetensorError:
            tensors = {}
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != found:
            raise ModelError(f"{self._file}: changed while it was read; load the adapter again once it is written")
        return tensors

    def _finite(self, name: str, tensor: torch.Tensor, scaling: float) -> torch.Tensor:
        """In float32, in memory of its own, scaled."""
        values = tensor.to(torch.float32, copy=True).mul_(scaling)
        smallest, largest = torch.aminmax(values)  # NaN if any is; a third of the time of isfinite().all()
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            stored = bool(torch.isfinite(tensor.to(torch.float64)).all())
            if stored:
                raise self._error(name, "holds numbers that leave the range of float32 once they are scaled")
            raise self._error(name, f"holds numbers that are NaN or infinite; {_AGAIN}")
        return values

    def _made_for(self) -> str:
        base = self._config.base_model
        return f"; the adapter was made for {shown(base)}" if base else ""

    def _error(self, name: str, complaint: str) -> ModelError:
        return ModelError(f"{self._file}: tensor {shown(name)} {complaint}")
