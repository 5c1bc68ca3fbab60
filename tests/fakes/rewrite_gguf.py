"""GGUF files made out of others: with other names of tensors, or in several parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFValueType as Kind

Tensors = dict[str, tuple[Any, gguf.GGMLQuantizationType]]  # by name: the stored bytes as an array, and their type


def rewrite(source: Path, out: Path, change: Callable[[Tensors], Tensors]) -> None:
    reader = gguf.GGUFReader(source)
    _write(out, reader, change(_tensors(reader)), {})


def split(source: Path, count: int, *, announced: int | None = None) -> list[Path]:
    """As llama.cpp's gguf-split does: all metadata in the first part, tensors in order. `announced`: how many the parts say that
    all of them have."""
    reader = gguf.GGUFReader(source)
    tensors = list(_tensors(reader).items())
    parts = []
    for number in range(count):
        own = {"split.no": (number, Kind.UINT16), "split.count": (count, Kind.UINT16),
               "split.tensors.count": (announced or len(tensors), Kind.INT32)}  # fmt: skip
        parts.append(source.with_name(f"{source.stem}-{number + 1:05}-of-{count:05}.gguf"))
        share = dict(tensors[number * len(tensors) // count : (number + 1) * len(tensors) // count])
        _write(parts[-1], reader if number == 0 else None, share, own)
    source.unlink()
    return parts


def _tensors(reader: gguf.GGUFReader) -> Tensors:
    return {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}


def _write(out: Path, like: gguf.GGUFReader | None, tensors: Tensors, own: dict[str, tuple[Any, Kind]]) -> None:
    architecture = like.fields["general.architecture"].contents() if like else "llama"
    writer = gguf.GGUFWriter(out, architecture)
    for key, field in (like.fields if like else {}).items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if field.types[0] == Kind.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for key, (value, kind) in own.items():
        writer.add_key_value(key, value, kind)
    for name, (data, type_) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
