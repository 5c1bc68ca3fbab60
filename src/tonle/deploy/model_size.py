"""`ModelSize`: how large a model is, without loading it: from its files if it is a path, else from its name.

Does: bytes of weights, bytes of KV cache per token, longest context. Does not: fetch anything, look into this machine's
cache of hub models (the same settings must give the same documents everywhere) or need torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from tonle.errors import ConfigError
from tonle.models import default_model

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PARAMETERS = re.compile(r"(?<![a-zA-Z0-9.])(\d+(?:\.\d+)?)([bBmM])(?![a-zA-Z0-9])")
# What the name of a quantized model says, and bytes per parameter with its scales.
_QUANTIZED = (
    (re.compile(r"(?i)(?<![a-z0-9])(awq|gptq|int4|w4a16|4bit|nf4|mxfp4|nvfp4|fp4|bnb)(?![a-z0-9])"), 0.6),
    (re.compile(r"(?i)(?<![a-z0-9])(fp8|int8|w8a8|w8a16|8bit)(?![a-z0-9])"), 1.05),
)
# Bytes of KV cache per token grow about with the square root of the parameters in models with grouped heads
# (Qwen2.5 1.5B: 28 KiB, Llama 3 8B: 128 KiB, 70B: 320 KiB); this is a little more than most have.
_KV_BYTES_OF_1B = 48 * 1024
_GUESSED_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class ModelSize:
    weight_bytes: int  # as they are kept while serving
    file_bytes: int  # as they are fetched
    kv_bytes_per_token: int  # in 16-bit numbers
    max_positions: int  # tokens
    origin: str  # where the numbers come from, for messages


# Of the default model's file; known, so that documents do not depend on whether it is on this machine.
_DEFAULT_FILE_BYTES, _DEFAULT_PARAMETERS = 96_576_768, 134_515_008


def is_path(model: str) -> bool:
    """By its form alone: a folder that happens to have the name of a hub model must not change what is rendered."""
    return model.startswith(("/", "./", "../", "~")) or model in (".", "..") or model.endswith(".gguf")


def model_size(model: str | None, *, dtype: str = "auto", parameters: str | None = None, on_gpu: bool) -> ModelSize:
    """Of a path, a hub name or None (the default model). Raises `ConfigError` if nothing says how large it is."""
    if model in (None, default_model.NAME) and parameters is None:
        weights = _DEFAULT_PARAMETERS * 2 if on_gpu else _DEFAULT_FILE_BYTES  # a GPU gets them in 16 bits
        return ModelSize(weights, _DEFAULT_FILE_BYTES, 23_040, 8192, "the default model")
    if model is not None and parameters is None and is_path(model) and Path(model).expanduser().exists():
        return _of_files(model, dtype, on_gpu=on_gpu)
    number = parameters or _from_name(model or "")
    if number is None:
        raise ConfigError(
            f"the size of {model} is not known: "
            + ("there is no such file" if is_path(model or "") else "its name does not say it")
            + "; set parameters, for example parameters: 7B",
            param="parameters",
        )
    return _of_parameters(number, model or "", dtype, by_name=parameters is None)


def _of_parameters(number: str, name: str, dtype: str, *, by_name: bool) -> ModelSize:
    count = float(number[:-1]) * (1e9 if number[-1] in "bB" else 1e6)
    quantized = next((size for pattern, size in _QUANTIZED if pattern.search(name)), None)
    weight_bytes = round(count * (_BYTES.get(dtype) or quantized or 2))
    return ModelSize(
        weight_bytes=weight_bytes,
        file_bytes=round(count * (quantized or 2)),
        kv_bytes_per_token=math.ceil(math.sqrt(count / 1e9) * _KV_BYTES_OF_1B),
        max_positions=_GUESSED_CONTEXT,
        origin=f"{number.upper()} parameters" + (", by its name" if by_name else ""),
    )


def _of_files(model: str, dtype: str, *, on_gpu: bool) -> ModelSize:
    from tonle.models.gguf_file import GGUFFile  # numpy, which a hub name does not need
    from tonle.models.outline import read_sizes
    from tonle.models.source import resolve

    source = resolve(model)
    spec = read_sizes(source)
    wanted = _BYTES.get(dtype)
    if source.kind == "gguf":
        tensors = GGUFFile(source.path).tensors.values()
        file_bytes = sum(tensor.data.nbytes for tensor in tensors)
        count = sum(math.prod(tensor.shape) for tensor in tensors)
        weight_bytes = count * (wanted or 2) if on_gpu or wanted else file_bytes
    else:
        file_bytes = sum(file.stat().st_size for file in source.path.glob("*.safetensors"))
        weight_bytes = file_bytes if wanted is None else file_bytes * wanted // _BYTES.get(spec.dtype, 2)
    return ModelSize(
        weight_bytes=weight_bytes,
        file_bytes=file_bytes,
        kv_bytes_per_token=2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2,
        max_positions=spec.max_positions,
        origin="its files",
    )


def _from_name(name: str) -> str | None:
    """1.5B of Qwen2.5-1.5B-Instruct: the last such number, since versions come first."""
    found = _PARAMETERS.findall(name.rstrip("/").rsplit("/", 1)[-1])
    return "".join(found[-1]) if found else None
