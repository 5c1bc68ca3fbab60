"""Sets of prompts that come with Tonle, by name."""

from __future__ import annotations

from pathlib import Path

SHIPPED = {"khmer": "everyday questions, short instructions and passages in Khmer, with counts per letter"}


def is_shipped(file: Path | None) -> bool:
    """A name, not a path: `./khmer` is a file of the caller's."""
    return file is not None and str(file) in SHIPPED and not file.exists()


def data_path(file: Path) -> Path:
    """Where the lines are: of a set that comes with Tonle, or the file itself."""
    return Path(__file__).with_name(f"{file}.jsonl") if is_shipped(file) else file
