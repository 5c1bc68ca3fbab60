"""What a model's own generation_config says that the engine does not read: its padding token, and whether to sample.

Does: live models, and folders of files. Does not: GGUF files, which have no such settings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tonle.models.source import resolve

_NAMES = ("pad_token_id", "eos_token_id", "do_sample")


def own_settings(model: Any) -> dict[str, Any]:
    """`pad_token_id`, `eos_token_id` (an int or a list) and `do_sample`, as far as the model names them."""
    if model is None:
        return {}
    if not isinstance(model, str | Path):
        live = getattr(model, "generation_config", None)
        return {name: value for name in _NAMES if (value := getattr(live, name, None)) is not None}
    source = resolve(model)
    if not source.path.is_dir():
        return {}
    found: dict[str, Any] = {}
    for file in ("config.json", "generation_config.json"):  # the second wins, as in transformers
        try:
            content = json.loads((source.path / file).read_bytes())
        except (OSError, ValueError):
            continue
        found |= {name: content[name] for name in _NAMES if content.get(name) is not None}
    return found


def token_ids(value: Any) -> list[int]:
    """Of a setting that is a token id, several, or missing."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
