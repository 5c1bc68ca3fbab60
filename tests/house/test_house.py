"""Limits on the size of files, functions and classes, and a few other rules. Raising a limit is a deliberate change."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tonle

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "tonle").rglob("*.py"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100  # a GPU kernel cannot call out as freely
MAX_CLASS_LINES = 320

VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 80


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_small_named_and_introduced(path: Path) -> None:
    source = path.read_text()
    tree = ast.parse(source)
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert not VAGUE & set(path.relative_to(ROOT).with_suffix("").parts)
    assert ast.get_docstring(tree), "say what the file owns"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.body[0].lineno + 1  # a command's options may be many
            limit = MAX_KERNEL_LINES if "cuda" in path.parts else MAX_FUNCTION_LINES
            assert lines <= limit, f"{node.name} has {lines} lines"
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_CLASS_LINES, f"{node.name} has {lines} lines"


def test_the_public_names_are_these() -> None:
    assert tonle.__all__ == ["LLM", "EngineConfig", "GenerationConfig", "GenerationResult", "InferenceConfig",
                             "InferenceEngine", "OptimizationConfig", "OptimizationLevel", "PerformanceOptimizer",
                             "RequestPriority", "ResponseCache", "StructuredOutput", "TonleError", "__version__",
                             "create_optimized_engine"]  # fmt: skip
    for name in tonle.__all__:
        assert getattr(tonle, name) is not None
    with pytest.raises(AttributeError):
        _ = tonle.Missing


def test_the_version_is_written_once_more_only_in_the_package() -> None:
    assert f'version = "{tonle.__version__}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("room", ["tonle", "tonle.bench", "tonle.replica.serve", "tonle.engine.front", "tonle.engine.process",
                                  "tonle.replica.frontend", "tonle.cli.serve_many", "tonle.cli"])  # fmt: skip
def test_what_serves_http_never_loads_torch(room: str) -> None:
    code = f"import sys, {room}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_documents_link_to_files_that_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_documents_link_to_headings_that_exist() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            headings = re.findall(r"(?m)^#+ (.+)$", (page.parent / target if target else page).read_text())
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {target}#{anchor}"
