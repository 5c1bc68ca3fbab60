"""`Form`: one way of storing a matrix in few bits; `QuantizedTensors`: a checkpoint's tensors with those matrices made whole.

Does: find which tensors belong to one matrix. Does not: know any layout (`awq.py`, `gptq.py`, …).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tonle.errors import ModelError
from tonle.models.layers import Quantized, Weight
from tonle.models.load.stored_tensors import StoredTensors
from tonle.models.weights import Shape

_NUMBERS = (torch.int8, torch.uint8, torch.float8_e4m3fn)  # what `Quantized` may hold
# Scales of activations, keys and values that some checkpoints bring: we compute those unquantized, or with scales of our own.
_IGNORED = (".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point",
            ".activation_scale", ".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point", ".kv_scale",
            ".weight_format")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one matrix, by what follows its name (`.scales`)."""

    name: str  # of the matrix
    stored: StoredTensors
    expert: int | None = None  # of tensors that hold all experts

    def __contains__(self, suffix: str) -> bool:
        return f"{self.name}{suffix}" in self.stored.shapes

    def __getitem__(self, suffix: str) -> torch.Tensor:
        self._check(suffix)
        return self.stored.get(f"{self.name}{suffix}", self.expert)

    def find(self, suffix: str) -> torch.Tensor | None:
        found = suffix in self
        return self[suffix] if found else None

    def words(self, suffix: str) -> torch.Tensor:
        """Numbers packed into int32. Of another type, they would be unpacked to something else."""
        return self.typed(suffix, torch.int32)

    def octets(self, suffix: str) -> torch.Tensor:
        """uint8."""
        return self.typed(suffix, torch.uint8)

    def floats(self, suffix: str) -> torch.Tensor:
        tensor = self[suffix]
        if not tensor.is_floating_point():
            raise ModelError(f"{self.name}{suffix} has type {tensor.dtype}, but should hold floats")
        return tensor

    def typed(self, suffix: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self[suffix]
        if tensor.dtype != dtype:
            raise ModelError(f"{self.name}{suffix} has type {tensor.dtype}, not {dtype}")
        return tensor

    def shape(self, suffix: str) -> Shape:
        self._check(suffix)
        return self.stored.shapes[f"{self.name}{suffix}"]

    def _check(self, suffix: str) -> None:
        if suffix not in self:
            raise ModelError(f"{self.name}{suffix} is missing")


class Form(ABC):
    """How one kind of checkpoint stores a matrix."""

    markers: ClassVar[tuple[str, ...]]  # each matrix in this form has a tensor with one of these after its name
    suffixes: ClassVar[tuple[str, ...]]  # all tensors of a matrix but its bias
    whole: ClassVar[str] = ".weight"  # what the matrix is called as one tensor

    @abstractmethod
    def shape(self, parts: Parts) -> Shape:
        """(out, in), without reading numbers where that can be; all experts' first, if the tensors hold those."""

    @abstractmethod
    def read(self, parts: Parts) -> Weight:
        """`Quantized`, or floats where groups of inputs are not contiguous."""


class QuantizedTensors:
    """As `StoredTensors`, with each quantized matrix as one tensor."""

    def __init__(self, stored: StoredTensors, form: Form) -> None:
        self._stored = stored
        self._form = form
        self._names = _matrices(stored.shapes, form)
        taken = {f"{name}{suffix}" for name in self._names.values() for suffix in form.suffixes}
        self.shapes: dict[str, Shape] = {
            name: shape
            for name, shape in stored.shapes.items()
            if name not in taken and not name.endswith(_IGNORED) and not _is_quant_state(name)
        }
        self.integers = {name: type_ for name, type_ in stored.integers.items() if name in self.shapes}
        for whole, name in self._names.items():
            with self._named(name):
                self.shapes[whole] = form.shape(Parts(name, stored))

    def get(self, name: str, expert: int | None = None) -> Weight:
        if name not in self._names:
            return self._stored.get(name, expert)
        with self._named(self._names[name]):
            weight = self._form.read(Parts(self._names[name], self._stored, expert))
            _check(weight, self.shapes[name] if expert is None else self.shapes[name][1:])
            return _tidy(weight)

    @contextlib.contextmanager
    def _named(self, matrix: str) -> Iterator[None]:
        """Errors get the folder and the matrix. The files are someone else's: tensors may have any shapes and types."""
        try:
            yield
        except ModelError as error:
            raise ModelError(f"{self._stored.folder}: quantized matrix {matrix}: {error.message}") from None
        except (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError) as error:
            raise ModelError(
                f"{self._stored.folder}: the tensors of the quantized matrix {matrix} do not fit together: {error}"
            ) from error


def _matrices(found: Collection[str], form: Form) -> dict[str, str]:
    """From the name of each quantized matrix as one tensor to what the names of its tensors begin with."""
    names = {
        name.removesuffix(marker) for name in found for marker in form.markers if name.endswith(marker)
    }  # fmt: skip
    return {f"{name}{form.whole}": name for name in names}


def _is_quant_state(name: str) -> bool:
    """bitsandbytes names one tensor of each matrix after its kind."""
    return ".weight.quant_state.bitsandbytes__" in name


def _check(weight: Weight, shape: Shape) -> None:
    """What all that use the matrix rely on. Raises `ValueError`."""
    if weight.shape != shape:
        raise ValueError(f"their numbers have the shape {tuple(weight.shape)}, not {shape}")
    if not isinstance(weight, Quantized):
        return
    if weight.numbers.dtype not in _NUMBERS:
        raise ValueError(f"numbers of type {weight.numbers.dtype}")
    groups = weight.scale.shape[-1]
    if weight.scale.shape[:-1] != shape[:-1] or not groups or shape[-1] % groups:
        raise ValueError(f"scales of shape {tuple(weight.scale.shape)} for a matrix of shape {shape}")
    if weight.minimum is not None and weight.minimum.shape != weight.scale.shape:
        raise ValueError(f"{tuple(weight.minimum.shape)} zero points for {tuple(weight.scale.shape)} scales")


def _tidy(weight: Weight) -> Weight:
    """In memory of its own: what a file maps may be strided, and read-only."""
    if not isinstance(weight, Quantized):
        return weight
    minimum = None if weight.minimum is None else weight.minimum.contiguous()
    return replace(weight, numbers=weight.numbers.contiguous(), scale=weight.scale.contiguous(), minimum=minimum)
