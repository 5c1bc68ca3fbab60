"""What the pages for agents print runs as it is printed: commands with curl, and programs with clients that are not ours."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.server import Server

ROOT = Path(__file__).parents[2]
ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost):8000")
PAGES = ("README.md", "docs/apis.md", "docs/embeddings.md", "docs/structured.md", "docs/tools.md")
OWN_ENGINE = "from tonle import"  # blocks that need no server; other tests run them

pytestmark = pytest.mark.model


def text_of(page: str) -> str:
    """Of the README, the section for agents alone; other tests run the rest."""
    text = (ROOT / page).read_text()
    return text.split("\n## For agents\n")[1].split("\n## ")[0] if page == "README.md" else text


def commands(page: str) -> Iterator[list[str]]:
    """Indented ones that begin with curl, over as many lines as their quotes are open."""
    lines = iter(re.findall(r"(?m)^    .*$", text_of(page)))
    for line in lines:
        if not re.match(r" {4}(\$ )?curl http", line):
            continue
        command = line.strip().removeprefix("$ ")
        while command.endswith("\\") or command.count("'") % 2:
            command = f"{command.removesuffix(chr(92))}\n{next(lines)}"
        yield shlex.split(command)


def program(page: str) -> str:
    """All of a page's blocks: later ones use names of earlier ones."""
    blocks = re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)
    return "\n".join(block for block in blocks if OWN_ENGINE not in block)


@pytest.mark.parametrize("page", PAGES)
def test_commands_work(page: str, default_server: Server) -> None:
    found = list(commands(page))
    assert found or page == "docs/apis.md"
    for command in found:
        told = [ADDRESS.sub(default_server.url, word) for word in command]
        done = subprocess.run([*told, "--silent", "--fail-with-body"], capture_output=True, timeout=240)
        assert done.returncode == 0, (command, done.stdout)
        assert "warnings" not in json.loads(done.stdout), command


@pytest.mark.parametrize("page", ("README.md", "docs/apis.md", "docs/tools.md"))
def test_programs_work(page: str, default_server: Server) -> None:
    for client in ("openai", "anthropic", "ollama"):
        pytest.importorskip(client)
    text = ADDRESS.sub(default_server.url, program(page))
    assert default_server.url in text
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
