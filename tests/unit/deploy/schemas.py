"""The validator of Kubernetes documents, from the folder that TONLE_K8S_SCHEMAS names."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("TONLE_K8S_SCHEMAS")


def validator() -> Callable[[Any], list[str]]:
    """What is wrong with a document, by the schema of its kind."""
    spec = importlib.util.spec_from_file_location("validate", Path(FOLDER or "") / "validate.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[Any], list[str]] = module.errors
    return found
