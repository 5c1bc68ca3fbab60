"""Compiled kernels are looked for in a folder of their own wherever numba would not take those it has."""

from __future__ import annotations

import os
from pathlib import Path

from tonle.models.cpu.numba_setup import _version


def sources(folder: Path, text: str = "x = 1") -> Path:
    folder.mkdir()
    (folder / "a.py").write_text(text)
    os.utime(folder / "a.py", (1_000_000, 1_000_000))
    return folder


def test_the_same_installation_finds_its_kernels_again(tmp_path: Path) -> None:
    folder = sources(tmp_path / "one")
    assert _version(folder, "numba 1") == _version(folder, "numba 1")


def test_anything_numba_asks_for_makes_another_folder(tmp_path: Path) -> None:
    folder = sources(tmp_path / "one")
    versions = {
        _version(folder, "numba 1"),
        _version(folder, "numba 2"),
        _version(sources(tmp_path / "two"), "numba 1"),
    }
    os.utime(folder / "a.py", (2_000_000, 2_000_000))  # installed again
    versions.add(_version(folder, "numba 1"))
    (folder / "a.py").write_text("x = 2")
    os.utime(folder / "a.py", (1_000_000, 1_000_000))
    versions.add(_version(folder, "numba 1"))
    assert len(versions) == 5
