"""The functions of the dashboard that only compute, in Node's own test runner. Pages are tested in a browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STATIC = HERE.parents[2] / "src/tonle/gateway/dashboard/static"


def test_functions(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    shutil.copytree(STATIC, tmp_path / "static")
    shutil.copy(HERE.parents[1] / "fakes/sentences.json", tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    files = [shutil.copy(path, tmp_path) for path in sorted(HERE.glob("*.test.js"))]
    done = subprocess.run(
        [node, "--test", *files], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# pass 0" not in done.stdout
