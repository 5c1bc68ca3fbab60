"""Models that are split over several GGUF files: `NAME-00001-of-00003.gguf` and so on, as llama.cpp's gguf-split names them.

Does: tell parts by their names, and find the others. Does not: read files; what they say of themselves is checked where they
are read (`models/gguf_file.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tonle.errors import ModelError

_PART = re.compile(r"(.+)-(\d{5})-of-(?!00000)(\d{5})", re.DOTALL)


def model_name(path: Path) -> str:
    """The file's name without its ending and the number of its part."""
    match = _PART.fullmatch(path.stem)
    return match[1] if match else path.stem


def first_part(path: Path) -> Path:
    """Of the model that the file is a part of, which has its metadata; the file itself where its name names no part."""
    match = _PART.fullmatch(path.stem)
    return path.with_name(f"{match[1]}-00001-of-{match[3]}{path.suffix}") if match else path


def whole_models(files: Iterable[Path]) -> list[Path]:
    """One file for each model: of those in parts the first."""
    return sorted({first_part(file) for file in files})


def is_whole(path: Path) -> bool:
    """Whether all of the model's files are there."""
    return all(part.is_file() for part in _named(path))


def all_parts(path: Path) -> list[Path]:
    """The files of one model, in order; of one that is not in parts, itself. Raises `ModelError` naming one that is missing."""
    parts = _named(path)
    for part in parts:
        if len(parts) > 1 and not part.is_file():
            raise ModelError(f"{part}: is missing; the model is in {len(parts)} files, which belong into one folder")
    return parts


def _named(path: Path) -> list[Path]:
    """The files that the name of one of them calls for."""
    match = _PART.fullmatch(path.stem)
    if match is None:
        return [path]
    numbers = range(1, int(match[3]) + 1)
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}{path.suffix}") for number in numbers]
