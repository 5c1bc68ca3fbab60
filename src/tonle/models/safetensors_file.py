"""`open_safetensors`: a checked safetensors file, or a `ModelError` that says what is wrong with it.

Does: tell a file that was cut short from one that is damaged, and name the tensor at the cut. Does not: know which tensors a
model has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tonle.errors import ModelError


def open_safetensors(file: Path) -> Any:
    """Its header is read and checked; tensors are read when asked for. Raises `ModelError` naming the file."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{file}: {_diagnose(file) or f'not a valid safetensors file: {error}'}") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}") from error
    except RuntimeError as error:  # torch maps it into memory
        raise ModelError(f"{file}: cannot be read: {error}") from error


def header_bytes(file: Path) -> int:
    """How long its header says it is. The format is a length, a JSON header of that length, the tensors' bytes."""
    with file.open("rb") as opened:
        return int.from_bytes(opened.read(8), "little")


def _diagnose(file: Path) -> str | None:
    """If the file was cut short, where."""
    size, header_size = file.stat().st_size, header_bytes(file)
    if size < 8 or header_size > size - 8:
        return f"truncated or not a safetensors file: its header should have {header_size} bytes, the file has {size}"
    with file.open("rb") as opened:
        opened.seek(8)
        try:
            header = json.loads(opened.read(header_size))
            ends = {name: int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            return None
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if 8 + header_size + end > size:
            return f"truncated: tensor {name} ends at byte {8 + header_size + end} but the file has {size}"
    return None
