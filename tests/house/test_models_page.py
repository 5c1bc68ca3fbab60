"""docs/models.md names every family, and the family shown in CONTRIBUTING.md is the real one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tonle.models.families import FAMILIES

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "models.md").read_text()
DIFF = re.search(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_has_a_row(architecture: str) -> None:
    (row,) = [line for line in TABLE.splitlines() if line.startswith("|") and f"`{architecture}`" in line]
    if (name := FAMILIES[architecture].gguf) is not None:
        assert f"| `{name}` |" in row


def test_the_diff_is_in_the_code() -> None:
    assert DIFF is not None
    shown: dict[str, str] = {}
    for line in DIFF[1].splitlines():
        if line.startswith("--- "):
            file = line.removeprefix("--- ")
            shown[file] = ""
        else:
            assert line.startswith("+")
            shown[file] += line.removeprefix("+") + "\n"
    assert len(shown) == 3
    assert "renamed=" in DIFF[1] and "joined=" in DIFF[1], "the family shown has names of its own"
    for file, lines in shown.items():
        assert lines in (ROOT / file).read_text(), f"{file} has changed: show it in CONTRIBUTING.md as it is"
