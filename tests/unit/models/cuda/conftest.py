"""Kernels on a CPU, through Triton's interpreter. Where there is a GPU, `tests/gpu` runs the compiled ones instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which nothing else on a CPU does


@pytest.fixture(autouse=True, scope="session")
def eight_bits() -> Iterator[None]:
    """The interpreter loses the carry where rounding leads to the next power of two: 127.3 becomes 64. torch does not."""
    from triton.runtime import interpreter

    original: Any = interpreter._convert_float

    def converted(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (str(source), str(target)) != ("fp32", "fp8e4nv"):
            return original(numbers, source, target, rounding)
        exact = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32).copy())
        return exact.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(numbers.shape)

    interpreter._convert_float = converted
    yield
    interpreter._convert_float = original


@pytest.fixture(autouse=True, scope="session")
def whole_numbers() -> Iterator[None]:
    """Newer numpy refuses int(array of one); the interpreter of some Triton versions relies on it for loop bounds."""
    from triton.runtime import interpreter

    original: Any = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    yield
    interpreter._patch_lang_tensor = original


@pytest.fixture(autouse=True, scope="session")
def masks() -> Iterator[None]:
    """`block & scalar` of two conditions is int32 to the interpreter, and that of Triton 3.9 takes no such mask."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    originals = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store")}

    def with_bools(method: Any, mask_at: int) -> Any:
        def called(self: Any, *arguments: Any, **options: Any) -> Any:
            before, mask, after = arguments[:mask_at], arguments[mask_at], arguments[mask_at + 1 :]
            bools = interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)
            return method(self, *before, bools, *after, **options)

        return called

    mask_places = {"create_masked_load": 1, "create_masked_store": 2}  # (ptrs, mask, …), (ptrs, values, mask, …)
    for name, mask_at in mask_places.items():
        setattr(builder, name, with_bools(originals[name], mask_at))
    yield
    for name, original in originals.items():
        setattr(builder, name, original)
