"""What a program gives as its model: a path, a hub name, a live `transformers` model, or nothing.

Does: find the weights, the text side (tokenizer, template) and the name of it. Does not: load weights (`build.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tonle.config.engine import EngineConfig
from tonle.engine.text import Text, load_text
from tonle.engine.text.no_text import NoText
from tonle.engine.text.template import read_template
from tonle.errors import ConfigError
from tonle.models.source import resolve


def open_given(model: Any, tokenizer: Any, config: EngineConfig) -> tuple[Any, Text, str]:
    """Source or live model, its text side, its name. Raises `ConfigError`, `ModelError`."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped: the engine has kernels of its own
    if model is None or isinstance(model, str | Path):
        source = resolve(model, chat_template=config.chat_template)
        if tokenizer is not None:
            return source, _live_text(tokenizer, config), source.name
        text = load_text(source, special_tokens_in_content=config.special_tokens_in_content)
        return source, text, source.name
    if not hasattr(model, "state_dict"):
        kind = repr(model) if isinstance(model, int | float | bytes) else f"an object of class {type(model).__name__}"
        raise ConfigError(f"model must be a path, a hub name, a transformers model or None, not {kind}", param="model")
    name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    return model, NoText() if tokenizer is None else _live_text(tokenizer, config), name


def _live_text(tokenizer: Any, config: EngineConfig) -> Text:
    file = config.chat_template
    specials = config.special_tokens_in_content
    return Text.from_live(tokenizer, file and read_template(file), special_tokens_in_content=specials)
