"""What some benchmarks need and `make serve` does not install."""

from __future__ import annotations

import importlib
import sys
from typing import Any

HOW = "make check, or pip install -e '.[dev]'"


def development_tool(name: str) -> Any:
    """The module, or one line on how to get it: this is no error of the program that a traceback would explain."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        sys.exit(f"This benchmark needs {name}, one of Tonle's development tools. Install them: {HOW}")
