"""Defaults of requests: what a model's authors, and then its operator, recommend.

Does: read generation_config.json (or what stands for it in a GGUF file or a live model), apply the operator's override,
settle the default length of an answer. Does not: apply them to a request (`GenerationDefaults.apply`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tonle.config.engine import GENERATION_KEYS, EngineConfig
from tonle.engine.request import SAMPLING_FIELDS, GenerationConfig, GenerationDefaults
from tonle.errors import ConfigError, InvalidRequest
from tonle.models import default_model
from tonle.models.gguf_file import GGUFFile
from tonle.models.source import ModelSource

log = logging.getLogger("tonle.engine")

_FILE = "generation_config.json"
_CPU_CHAT_TOKENS = 1024  # about half a minute of a small model
_GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def read_defaults(model: ModelSource | Any, config: EngineConfig) -> tuple[GenerationDefaults, list[int]]:
    """Defaults of requests to `model` (a source, or a live transformers model), and tokens that end every answer.

    A value of the model's own that makes no sense is passed over with a warning; one that the operator gave raises
    `ConfigError`.
    """
    values = _of_folder(config.generation_config) if _is_folder(config.generation_config) else _of_model(model)
    stops = _listed(values.pop("eos_token_id", None))  # of the model, whatever the settings: without them it rambles
    if config.generation_config == "none":
        values = {}
    override = _checked(config.override_generation_config or {}, "override_generation_config", strict=True)
    stops += _listed(override.pop("eos_token_id", None))
    limit = override.get("max_new_tokens")
    values |= override
    chat = config.default_max_tokens or values.get("max_new_tokens")
    return GenerationDefaults(**values, max_chat_tokens=chat, max_tokens_limit=limit), stops


def suited_to_cpu(defaults: GenerationDefaults, config: EngineConfig) -> GenerationDefaults:
    """There, an answer that fills the context would take minutes: it must be asked for."""
    if config.default_max_tokens is not None:
        return defaults
    return msgspec.structs.replace(
        defaults, max_chat_tokens=min(defaults.max_chat_tokens or _CPU_CHAT_TOKENS, _CPU_CHAT_TOKENS)
    )


def _is_folder(setting: str) -> bool:
    return setting not in ("auto", "none")


def _of_folder(setting: str) -> dict[str, Any]:
    file = Path(setting).expanduser() / _FILE
    try:
        return _checked(_read(file), str(file), strict=True)
    except OSError as error:
        raise ConfigError(
            f"generation_config is auto, none, or a folder with a {_FILE}, not {setting!r}: {error.strerror or error}",
            param="generation_config",
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}", param="generation_config") from None


def _of_model(model: ModelSource | Any) -> dict[str, Any]:
    if not isinstance(model, ModelSource):
        live = getattr(model, "generation_config", None)
        found = {} if live is None else live.to_diff_dict()  # leaves out what transformers itself has as defaults
        return _checked(found, "the live model's generation_config")
    if model.kind == "gguf":
        metadata = GGUFFile(model.path).metadata
        found = {name: metadata[key] for key, name in _GGUF_KEYS.items() if key in metadata}
        return _checked(found or default_model.generation_config(model.path), str(model.path))
    file = model.path / _FILE
    try:
        return _checked(_read(file), str(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s is ignored: %s", file, error)
        return {}


def _read(file: Path) -> dict[str, Any]:
    """Raises `OSError`, `ValueError`."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"it must hold a JSON object, not a {type(content).__name__}")
    return content


def _checked(found: Mapping[str, Any], origin: str, *, strict: bool = False) -> dict[str, Any]:
    """The values that we know and that make sense. `strict`: raise `ConfigError` for one that does not."""
    values = {}
    for name in GENERATION_KEYS:
        if (value := found.get(name)) is None:
            continue
        value = 0 if name == "top_k" and value == -1 else value  # both mean off
        try:
            _check(name, value)
        except ValueError as error:
            if strict:
                raise ConfigError(f"{origin}: {error}", param=name) from None
            log.warning("%s: %s; the value is ignored", origin, error)
        else:
            values[name] = value
    return values


def _check(name: str, value: Any) -> None:
    """Raises `ValueError`."""
    if name == "eos_token_id":
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise ValueError(f"eos_token_id must be a token id or a list of them, not {value!r}")
        return
    field = name if name in SAMPLING_FIELDS else "max_length"
    try:
        GenerationConfig(**{field: value}).validate()
    except InvalidRequest as error:
        raise ValueError(error.message.replace(field, name, 1).replace(" or None", "")) from None


def _listed(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
