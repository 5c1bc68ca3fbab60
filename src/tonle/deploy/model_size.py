"""`ModelSize`: how large a model is, without loading it: from its files where they are on this machine, else from its name.

Does: bytes of weights, bytes of keys and values per token, longest context. Does not: fetch anything or need torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tonle.errors import ConfigError
from tonle.models import default_model
from tonle.models.gguf_file import GGUFFile
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource, cached_models, resolve

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PARAMETERS = re.compile(r"(?<![a-zA-Z0-9.])(\d+(?:\.\d+)?)([bBmM])(?![a-zA-Z0-9])")
_KV_BYTES_PER_BILLION = 16 * 1024  # per token: 128 KiB for Llama 3 8B, a little less for most others of today
_GUESSED_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class ModelSize:
    weight_bytes: int
    kv_bytes_per_token: int  # in 16-bit numbers
    max_positions: int  # tokens
    origin: str  # where the numbers come from, for messages


# Of the default model's file; known, so that documents do not depend on whether it is on this machine.
_DEFAULT = ModelSize(weight_bytes=96_576_768, kv_bytes_per_token=23_040, max_positions=8192, origin="the default model")


def model_size(model: str | None, *, dtype: str = "auto", parameters: str | None = None) -> ModelSize:
    """Of a path, a hub name or None (the default model). Raises `ConfigError` if nothing says how large it is."""
    if model is None and parameters is None:
        return _DEFAULT
    source = _on_this_machine(model)
    if source is not None:
        return _of_files(source, dtype)
    number = parameters or _from_name(model or default_model.NAME)
    if number is None:
        raise ConfigError(
            f"the size of {model} is not known: it is not on this machine and its name does not say; set parameters, "
            "for example parameters: 7B",
            param="parameters",
        )
    count = float(number[:-1]) * (1e9 if number[-1] in "bB" else 1e6)
    return ModelSize(
        weight_bytes=round(count * _BYTES.get(dtype, 2)),
        kv_bytes_per_token=max(1, round(count / 1e9 * _KV_BYTES_PER_BILLION)),
        max_positions=_GUESSED_CONTEXT,
        origin=f"{number.upper()} parameters" + ("" if parameters else ", by its name"),
    )


def _on_this_machine(model: str | None) -> ModelSource | None:
    if model is None:
        return None
    if Path(model).expanduser().exists():
        return resolve(model)
    return next((source for source in cached_models() if source.name == model), None)


def _of_files(source: ModelSource, dtype: str) -> ModelSize:
    spec = read_spec(source)
    if source.kind == "gguf":
        num_bytes = sum(tensor.data.nbytes for tensor in GGUFFile(source.path).tensors.values())
    else:
        num_bytes = sum(file.stat().st_size for file in source.path.glob("*.safetensors"))
        stored, wanted = _BYTES.get(spec.dtype, 2), _BYTES.get(dtype)
        num_bytes = num_bytes if wanted is None else num_bytes * wanted // stored
    return ModelSize(
        weight_bytes=num_bytes,
        kv_bytes_per_token=2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2,
        max_positions=spec.max_positions,
        origin="its files",
    )


def _from_name(name: str) -> str | None:
    """1.5B of Qwen2.5-1.5B-Instruct: the last such number, since versions come first."""
    found = _PARAMETERS.findall(name.rsplit("/", 1)[-1])
    return "".join(found[-1]) if found else None
