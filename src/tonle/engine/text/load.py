"""`load_text`: a model's tokenizer and chat template from its files.

Does: folders in the Hugging Face layout (tokenizer.json and the JSON files around it) and GGUF files. Does not:
fetch, or convert tokenizers of other kinds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from tonle.engine.text.codec import rust_codec
from tonle.engine.text.gguf_tokenizer import set_bos, tokenizer_from_gguf
from tonle.engine.text.template import ChatTemplate, read_template
from tonle.engine.text.text import Text
from tonle.errors import ModelError
from tonle.models.gguf_file import GGUFFile
from tonle.models.source import ModelSource


def load_text(source: ModelSource, *, special_tokens_in_content: str = "text") -> Text:
    """`special_tokens_in_content`: see `EngineConfig`.

    Raises `ModelError` where the files lack a tokenizer or hold one that is not supported, `ConfigError` where the chat
    template that stands in for the model's cannot be used.
    """
    own = None if source.chat_template is None else {"default": read_template(source.chat_template)}
    if source.kind == "gguf":
        return _from_gguf(GGUFFile(source.path).metadata, own, special_tokens_in_content)
    return _from_folder(source.path, own, special_tokens_in_content)


def _from_gguf(
    metadata: Mapping[str, Any], own_templates: Mapping[str, str] | None, special_tokens_in_content: str
) -> Text:
    tokenizer = tokenizer_from_gguf(metadata)
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "eot": "eot", "eom": "eom"}
    ids: dict[str, int] = {
        name: metadata[f"tokenizer.ggml.{key}_token_id"]
        for name, key in keys.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    special = {name: tokenizer.id_to_token(token) or "" for name, token in ids.items() if name.endswith("_token")}
    return Text(
        rust_codec(tokenizer),
        bos_id=ids.get("bos_token"),
        eos_ids=[ids[name] for name in ("eos_token", "eot", "eom") if name in ids],
        template=_template(own_templates or _gguf_templates(metadata), special),
        special_tokens_in_content=special_tokens_in_content,
    )


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """By name: `tokenizer.chat_template` is the default, `tokenizer.chat_template.tool_use` is `tool_use`."""
    prefix = "tokenizer.chat_template"
    return {
        key.removeprefix(prefix).lstrip(".") or "default": value
        for key, value in metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }


def _from_folder(folder: Path, own_templates: Mapping[str, str] | None, special_tokens_in_content: str) -> Text:
    tokenizer = _read_tokenizer(folder)
    config = _read_json(folder / "tokenizer_config.json")
    special = dict(_special_tokens({**_read_json(folder / "special_tokens_map.json"), **config}))
    model = {**_read_json(folder / "config.json"), **_read_generation_config(folder)}
    bos_id = _token_id(tokenizer, special.get("bos_token"))
    if "add_bos_token" in config and bos_id is not None:
        _match_bos(tokenizer, bos_id, wanted=bool(config["add_bos_token"]))
    return Text(
        rust_codec(tokenizer),
        bos_id=bos_id,
        eos_ids={*_listed(model.get("eos_token_id")), *_listed(_token_id(tokenizer, special.get("eos_token")))},
        template=_template(own_templates or _folder_templates(folder, config), special),
        special_tokens_in_content=special_tokens_in_content,
    )


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        command = f"T.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        raise ModelError(
            f"{folder} has no tokenizer.json. If it has a tokenizer of another kind, convert it once: "
            f'python -c "from transformers import AutoTokenizer as T; {command}"'
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` has no exception of its own
        raise ModelError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _read_generation_config(folder: Path) -> dict[str, Any]:
    """Empty where it cannot be read: the engine warns of that."""
    try:
        return _read_json(folder / "generation_config.json")
    except ModelError:
        return {}


def _special_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """bos_token, eos_token, ...: a string, or an object that describes the token."""
    for name, value in config.items():
        if name.endswith("_token") and isinstance(value, str):
            yield name, value
        elif name.endswith("_token") and isinstance(value, dict) and isinstance(value.get("content"), str):
            yield name, value["content"]


def _token_id(tokenizer: Tokenizer, token: str | None) -> int | None:
    return None if token is None else tokenizer.token_to_id(token)


def _listed(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _match_bos(tokenizer: Tokenizer, bos_id: int, *, wanted: bool) -> None:
    """tokenizer_config.json has the last word on BOS, and is what people edit; tokenizer.json may say otherwise."""
    adds = tokenizer.encode("a").ids[:1] == [bos_id]
    if wanted and not adds:
        set_bos(tokenizer, bos_id)
    elif adds and not wanted:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. A file of its own outranks the one inside tokenizer_config.json."""
    templates = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template") or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    elif isinstance(templates, list):
        templates = {entry["name"]: entry["template"] for entry in templates}
    named = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        named["default"] = folder / "chat_template.jinja"
    return {**templates, **{name: path.read_text(encoding="utf-8") for name, path in named.items()}}


def _template(sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    return ChatTemplate(sources, special_tokens=special_tokens) if sources else None
