"""Folders that a `FakeFront` takes for adapters: one file, whose text every answer begins with."""

from __future__ import annotations

import hashlib
from pathlib import Path


def folder_of(path: Path, text: str) -> str:
    path.mkdir(exist_ok=True)
    (path / "adapter.txt").write_text(text)
    return str(path)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
