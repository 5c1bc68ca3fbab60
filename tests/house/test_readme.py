"""The README's Python runs as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.checkpoints import save_folder
from tonle.models.source import ModelSource

ROOT = Path(__file__).parents[2]
HUB_NAME = '"HuggingFaceTB/SmolLM2-135M-Instruct"'
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def block(*words: str) -> str:
    """The one with these words."""
    [found] = [text for text in BLOCKS if all(word in text for word in words)]
    return found


def run(program: str) -> str:
    search_path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": search_path, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.model
def test_the_simple_way(default_model: ModelSource) -> None:
    assert "Paris" in run(block("llm = LLM()"))


@pytest.mark.model
def test_the_engine(default_model: ModelSource) -> None:
    assert "num_steps" in run(block("async def ask"))


def test_a_live_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    save_folder("llama", folder)
    program = block("AutoModelForCausalLM")
    assert HUB_NAME in program
    assert run(program.replace(HUB_NAME, repr(str(folder))))
