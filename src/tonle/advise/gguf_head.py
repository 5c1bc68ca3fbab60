"""`read_gguf_head`: the metadata and the tensors' names, sizes and types of a GGUF file, versions 2 and 3.

Does: what sizing needs, without numpy. Does not: read tensors' numbers or vocabularies (`models/gguf_file.py` does, for
serving; it belongs to the mathematics, which advice must not import).
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tonle.config.gguf_parts import all_parts
from tonle.errors import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16", 39: "MXFP4",
}  # fmt: skip
_MAX_STRING = 1 << 24
_MAX_ENTRIES = 1 << 20
_MAX_DEPTH = 8
_SHORT = 64  # arrays of more numbers or texts are skipped: vocabularies


class GgufHead(NamedTuple):
    architecture: str
    metadata: dict[str, Any]  # numbers and texts; of arrays only short ones
    vocab_size: int
    tied: bool  # no output matrix of its own
    commonest_type: str | None  # of most weights; None: 16 or 32 bits
    file_bytes: int  # of all its files


class _Tensor(NamedTuple):
    name: str
    sizes: list[int]  # innermost first
    kind: int  # the format's number of its type


def read_gguf_head(path: Path) -> GgufHead:
    """Raises `ModelError` naming the file."""
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path} is neither a folder nor a .gguf file")
    parts = all_parts(path)
    heads = [_read_part(part) for part in parts]
    metadata, tensors = heads[0][0], [tensor for _, tensors in heads for tensor in tensors]
    return _head(parts[0], metadata, tensors, sum(part.stat().st_size for part in parts))


def _read_part(path: Path) -> tuple[dict[str, Any], list[_Tensor]]:
    try:
        with path.open("rb") as file:
            return _read(_Reader(file, path))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Reader:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self.path = path

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def take(self, count: int) -> bytes:
        found = self._file.read(count)
        if len(found) < count:
            raise ModelError(f"{self.path}: the file ends too early to be a whole GGUF file")
        return found

    def count(self, most: int) -> int:
        number = int(self.number("<Q"))
        if number > most:
            raise ModelError(f"{self.path}: broken: it announces {number:,} entries")
        return number

    def text(self) -> str:
        return self.take(self.count(_MAX_STRING)).decode(errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < _MAX_DEPTH:
            of, count = self.number("<I"), self.count(1 << 32)
            if of in _SCALARS:
                size = struct.calcsize(_SCALARS[of])
                if count > _SHORT:
                    self._file.seek(count * size, 1)
                    return None
                return [self.number(_SCALARS[of]) for _ in range(count)]
            items = (self.value(of, depth + 1) for _ in range(count))
            return list(items) if count <= _SHORT else _skip(items)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        raise ModelError(f"{self.path}: broken: a value of the unknown type {kind}")


def _skip(items: Any) -> None:
    for _ in items:
        pass


def _read(reader: _Reader) -> tuple[dict[str, Any], list[_Tensor]]:
    """Metadata and tensors of one file."""
    if reader.take(4) != b"GGUF":
        raise ModelError(f"{reader.path} is not a GGUF file")
    if (version := reader.number("<I")) not in (2, 3):
        raise ModelError(f"{reader.path}: GGUF version {version} is not supported; supported: 2, 3")
    num_tensors, num_values = reader.count(_MAX_ENTRIES), reader.count(_MAX_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.text()
        metadata[key] = reader.value(reader.number("<I"))
    tensors: list[_Tensor] = []
    for _ in range(num_tensors):
        name, sizes = reader.text(), [int(reader.number("<Q")) for _ in range(reader.number("<I"))]
        kind, _ = reader.number("<I"), reader.number("<Q")
        tensors.append(_Tensor(name, sizes, kind))
    return metadata, tensors


def _head(path: Path, metadata: dict[str, Any], tensors: list[_Tensor], file_bytes: int) -> GgufHead:
    weights: Counter[int] = Counter()
    vocab_size = 0
    for name, sizes, kind in tensors:
        if name == "token_embd.weight" and sizes:
            vocab_size = sizes[-1]  # the file counts from the innermost
        elif len(sizes) > 1:
            weights[kind] += math.prod(sizes)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not vocab_size:
        raise ModelError(f"{path}: it holds no language model: its architecture or token_embd.weight is missing")
    commonest = weights.most_common(1)[0][0] if weights else 0
    plain = commonest in (0, 1, 30)
    return GgufHead(
        architecture,
        metadata,
        vocab_size,
        tied=all(name != "output.weight" for name, _, _ in tensors),
        commonest_type=None if plain else _TYPES.get(commonest, f"type {commonest}"),
        file_bytes=file_bytes,
    )
