"""`CudaRunner` has fields of its own, not `Runner`'s: whatever it takes from `Runner` must do without those.

Read from the source: importing it needs triton, which machines without a GPU mostly lack. Without this, an engine that cannot be
built on a GPU goes unnoticed there.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from tonle.engine.run import runner

_RUNNER = Path(inspect.getfile(runner))


def methods(path: Path, name: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def of_self(function: ast.FunctionDef, context: type[ast.expr_context]) -> set[str]:
    """Names of its `self.name`, read or written."""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and isinstance(node.ctx, context)
    }


def missing(base: dict[str, ast.FunctionDef], derived: dict[str, ast.FunctionDef]) -> Iterator[tuple[str, str]]:
    """Methods of `base` that objects of `derived` run, each with a field that these lack."""
    lacked = of_self(base["__init__"], ast.Store) - of_self(derived["__init__"], ast.Store)
    todo = [name for name in base if not name.startswith("_") and name not in derived]
    todo += [name for function in derived.values() for name in of_self(function, ast.Load) if name in base]
    seen: set[str] = set(derived)
    while todo:
        name = todo.pop()
        if name in seen or name not in base:
            continue
        seen.add(name)
        used = of_self(base[name], ast.Load)
        yield from ((name, field) for field in sorted(used & lacked))
        todo += used


def test_what_cudas_runner_inherits_needs_no_field_that_it_lacks() -> None:
    base, derived = methods(_RUNNER, "Runner"), methods(_RUNNER.with_name("cuda.py"), "CudaRunner")
    assert list(missing(base, derived)) == []


def test_a_property_that_is_not_overridden_is_found() -> None:
    base, derived = methods(_RUNNER, "Runner"), methods(_RUNNER.with_name("cuda.py"), "CudaRunner")
    del derived["kernel_changes"]
    assert list(missing(base, derived)) == [("kernel_changes", "_model")]
