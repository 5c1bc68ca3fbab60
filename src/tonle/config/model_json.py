"""JSON files beside a model's weights: `config.json` and its kind. Needs no torch, so that sizing can read them, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tonle.errors import ModelError


def read_json(file: Path) -> dict[str, Any]:
    """Raises `ModelError`, naming the file, if it does not hold a JSON object."""
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: should hold a JSON object, not a {type(content).__name__}")
    return content
