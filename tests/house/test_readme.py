"""The README's Python runs as it is printed, and its documents are rendered as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.fakes.checkpoints import save_folder
from tonle.cli.app import app
from tonle.models.source import ModelSource

ROOT = Path(__file__).parents[2]
HUB_NAME = '"HuggingFaceTB/SmolLM2-135M-Instruct"'
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


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


def test_the_documents_to_deploy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    [command] = re.findall(r"(?m)^    tonle (deploy render .*)$", TEXT)
    done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.stderr
    there = {line.split()[1] for line in done.stderr.splitlines() if line.startswith("unchanged")}
    assert there == set(re.findall(r"kubectl apply -f (\S+)", TEXT))
    name = "lean-rag-inference"
    assert f"name: {name}\n" in Path("deploy/kserve/kserve-inferenceservice.yaml").read_text()
    assert len(re.findall(rf"get inferenceservice {name}|inferenceservice={name}", TEXT)) == 3
