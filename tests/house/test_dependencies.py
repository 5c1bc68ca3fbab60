"""The package imports what pyproject.toml declares, and declares what it imports."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.checkpoints import save_folder
from tests.unit.cli.test_serve import read_url, server, wait_ready

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "tonle").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

COMES_WITH = {"llvmlite": "numba", "triton": "torch"}  # no release of one goes without the other
IMPORTED_AS = {"pyyaml": "yaml", "nvidia-ml-py": "pynvml", "opentelemetry-sdk": "opentelemetry",
               "pyzmq": "zmq", "piper-tts": "piper"}  # fmt: skip
# Installed with the development tools, and once part of what the server needed.
NOT_OURS = ("httpx", "starlette", "uvicorn", "requests", "aiohttp")
# Importing one of these from our code fails; other packages may use them. Children have it too: it is a sitecustomize.py.
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NOT_OURS}:
            frame = sys._getframe(1)
            while frame and frame.f_code.co_filename.startswith("<frozen importlib"):
                frame = frame.f_back
            if frame and frame.f_globals.get("__name__", "").partition(".")[0] in ("tonle", "__main__"):
                raise ModuleNotFoundError(f"not declared: {{name}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def modules_of(requirements: list[str]) -> set[str]:
    names = {re.split(r"[\[<>=;~! ]", requirement)[0].lower() for requirement in requirements}
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


NEEDED = modules_of(PROJECT["dependencies"])
OPTIONAL = modules_of(
    [line for extra, lines in PROJECT["optional-dependencies"].items() if extra != "dev" for line in lines]
)


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """Top-level names of packages that are neither ours nor Python's."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return {COMES_WITH.get(name, name) for name in found - {"tonle"} - sys.stdlib_module_names}


def everything(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_what_is_declared(path: Path) -> None:
    assert imported(everything(path)) <= NEEDED | OPTIONAL


def test_what_is_declared_is_imported() -> None:
    used = set[str]().union(*(imported(everything(path)) for path in SOURCES))
    assert NEEDED - used == set()


@pytest.fixture
def without_the_others(tmp_path: Path) -> dict[str, str]:
    """Variables of a process in which tonle can import none of `NOT_OURS`."""
    folder = tmp_path / "blocker"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER)
    paths = [str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_python(code: str, variables: dict[str, str]) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    ).stdout


def test_the_blocker_blocks(without_the_others: dict[str, str]) -> None:
    code = "import huggingface_hub.file_download\ntry: import uvicorn\nexcept ModuleNotFoundError: print('blocked')"
    assert run_python(code, without_the_others) == "blocked\n"


@pytest.mark.parametrize(
    "modules",
    ["tonle.cli, tonle.cli.serve, tonle.cli.serve_many, tonle.cli.gateway, tonle.cli.bench, tonle.cli.audit_records",
     "tonle.replica.serve, tonle.replica.frontend, tonle.gateway.gateway", "tonle.cli.backends.remote, tonle.bench",
     "tonle.audit, tonle.audit.replay_records, tonle.models.source, tonle.engine"],
)  # fmt: skip
def test_it_imports_without_the_others(modules: str, without_the_others: dict[str, str]) -> None:
    run_python(f"import {modules}", without_the_others)


def test_it_serves_without_the_others(without_the_others: dict[str, str], tmp_path: Path) -> None:
    save_folder("llama", tmp_path / "tiny")
    with server(str(tmp_path / "tiny"), "--device", "cpu", variables=without_the_others) as process:
        url = read_url(process)
        wait_ready(url)
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert reply.json()["usage"]["completion_tokens"] == 4
