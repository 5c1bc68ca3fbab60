"""`resolve`: from what a user calls a model to the files on this machine.

Does: local folders, GGUF files, hub names, the default model; lists what is cached. Does not: read weights or need
torch, so a process that only tokenizes can use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tonle.config.cache_dir import cache_dir, hub_dir
from tonle.config.gguf_parts import all_parts, is_whole, model_name, whole_models
from tonle.errors import ConfigError, ModelError

# What a folder needs to be served. Some hub repositories carry the weights a second time, in subfolders or as
# `consolidated*`; those would only double the download.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
_HUB_SKIPPED = ["*/*", "consolidated*"]
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # not ./folder or ../folder


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files, present on this machine."""

    kind: Literal["folder", "gguf"]
    path: Path  # the folder with config.json, or the .gguf file; of a model in several, the first
    name: str  # what clients of the API call it
    chat_template: Path | None = None  # a Jinja file to use instead of the model's own


def resolve(model: str | Path | None, *, chat_template: str | Path | None = None, progress: bool = True) -> ModelSource:
    """Find the model, fetching it if it is a hub name or the default (None) and not here yet.

    `chat_template`: a file to use instead of the model's template. `progress` shows how a fetch is going on stderr.
    Raises `ModelError`, `ConfigError`.
    """
    template = None if chat_template is None else _template_file(Path(chat_template))
    return replace(_find(model, progress=progress), chat_template=template)


def _template_file(path: Path) -> Path:
    """Before a model is fetched in vain."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(
            f"the chat template {path} is not a file; give the path of a Jinja file", param="chat_template"
        )
    return path


def _find(model: str | Path | None, *, progress: bool) -> ModelSource:
    from tonle.models import default_model

    if model is None or model == default_model.NAME:
        path = default_model.find(cache_dir())
        if not default_model.is_present(path):
            default_model.fetch(path, progress=progress)
        return ModelSource("gguf", path, default_model.NAME)
    path = Path(model).expanduser()
    if path.exists():
        return _local(path)
    if isinstance(model, str) and _HUB_NAME.fullmatch(model):
        return _from_hub(model, progress=progress)
    raise ModelError(
        f"no model at {path}: there is no such file or folder. "
        f"Give a folder with config.json, a .gguf file, or a hub name like org/name"
    )


def cached_models() -> list[ModelSource]:
    """Every model that `resolve` can return without a network: Tonle's own cache, then the hub's."""
    from tonle.models import default_model

    default = default_model.find(cache_dir())
    present = (*default_model.path(cache_dir()).parent.glob("*.gguf"), *default.parent.glob(default.name))
    files = [path for path in whole_models(present) if is_whole(path)]
    found = [ModelSource("gguf", path, default_model.NAME if path == default else model_name(path)) for path in files]
    return found + sorted(_in_hub_cache(), key=lambda source: source.name)


def _local(path: Path) -> ModelSource:
    path = path.resolve()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is neither a folder nor a .gguf file")
        return _gguf(path)
    if (path / "config.json").is_file():
        return ModelSource("folder", path, path.name)
    ggufs = whole_models(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _gguf(ggufs[0])
    if ggufs:
        raise ModelError(f"{path} holds {len(ggufs)} GGUF models; name one: {', '.join(file.name for file in ggufs)}")
    raise ModelError(f"{path} is no model: it has neither a config.json nor a .gguf file")


def _gguf(path: Path) -> ModelSource:
    """Of a model in parts, each of them stands for all."""
    return ModelSource("gguf", all_parts(path)[0], model_name(path))


def _from_hub(name: str, *, progress: bool) -> ModelSource:
    from huggingface_hub import snapshot_download

    bars: dict[str, Any] = {} if progress else {"tqdm_class": _silent_bar()}
    try:
        folder = snapshot_download(
            name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIPPED, cache_dir=hub_dir(), **bars
        )
    except Exception as error:  # the hub's client raises errors of five libraries; all mean the same to a user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{name!r} is neither a path on this machine nor could it be fetched as a hub model ({reason}). "
            f"Check the name and the connection, or give the path of a folder or a .gguf file"
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(
            f"the hub model {name!r} has no config.json. "
            f"If it is a collection of GGUF files, fetch one of them and give its path"
        )
    return ModelSource("folder", Path(folder), name)


def _silent_bar() -> type:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    return SilentBar


def _in_hub_cache() -> Iterator[ModelSource]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(hub_dir() or constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repo in repos:
        revision = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        if repo.repo_type != "model" or revision is None:
            continue
        names = {file.file_name for file in revision.files}
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            yield ModelSource("folder", revision.snapshot_path, repo.repo_id)
