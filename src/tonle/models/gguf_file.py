"""`GGUFFile`: what is in a GGUF file, or in the several that a model is split over, read through a memory map.

Does: header, metadata, the place and type of every tensor, and a clear refusal of files that are cut short or broken.
Does not: touch tensor bytes (see `load/gguf.py`), know of architectures, or need torch. Reads versions 2 and 3.

Why not the `gguf` package's reader: it makes several numpy arrays per array element, so opening the default model takes it
2.4 s and 167 MB, and this one 40 ms and 11 MB. On broken files it raises numpy's own errors without a path, and one that
announces 2**40 numbers in an array keeps it looping for days.
"""

from __future__ import annotations

import enum
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from tonle.config.gguf_parts import all_parts
from tonle.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32  # bytes; `general.alignment` overrides
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 8  # known files have at most two

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# Metadata value types, as numbered by the format.
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, tuple[struct.Struct, str]] = {  # type -> (one value, numpy dtype of an array of them)
    0: (struct.Struct("<B"), "<u1"),
    1: (struct.Struct("<b"), "<i1"),
    2: (struct.Struct("<H"), "<u2"),
    3: (struct.Struct("<h"), "<i2"),
    4: (_U32, "<u4"),
    5: (struct.Struct("<i"), "<i4"),
    6: (struct.Struct("<f"), "<f4"),
    _BOOL: (struct.Struct("<?"), "?"),
    10: (_U64, "<u8"),
    11: (struct.Struct("<q"), "<i8"),
    12: (struct.Struct("<d"), "<f8"),
}


class GGMLType(enum.IntEnum):
    """How the numbers of a tensor are stored: a run of blocks. The format's number, numbers in a block, bytes of a block."""

    block_numbers: int
    block_bytes: int

    def __new__(cls, number: int, block_numbers: int, block_bytes: int) -> Self:
        member = int.__new__(cls, number)
        member._value_ = number
        member.block_numbers = block_numbers
        member.block_bytes = block_bytes
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18


_TYPES = {type_.value: type_ for type_ in GGMLType}


@dataclass(frozen=True, slots=True, eq=False)
class GGUFTensor:
    """One tensor, still in its stored form."""

    name: str
    shape: tuple[int, ...]  # outermost first, as torch counts; the file counts the other way
    type: GGMLType
    data: npt.NDArray[np.uint8]  # the stored bytes, a view into the memory map


class GGUFFile:
    """An open GGUF file, with the other parts of its model where that is split. The map is closed when the file and every view
    into it are gone.

    `metadata` holds Python scalars and strings; arrays of numbers are numpy arrays, arrays of strings are lists.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata, self.tensors = _read(self.path)
        if (count := self._split("count", 1)) > 1:
            self._add_parts(count)

    def _split(self, key: str, default: int) -> int:
        value = self.metadata.get(f"split.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.path}: corrupt: split.{key} should be a whole number, not {value!r}")
        return value

    def _add_parts(self, count: int) -> None:
        """The tensors of the other files. This one has the metadata of all."""
        if (number := self._split("no", 0)) != 0:
            raise ModelError(f"{self.path}: part {number + 1} of {count} of a model; give the path of the first")
        parts = all_parts(self.path)
        if len(parts) != count:
            raise ModelError(
                f"{self.path}: the first of {count} parts of a model, which should be named …-00001-of-{count:05}.gguf and so on"
            )
        for index, part in enumerate(parts[1:], start=1):
            metadata, tensors = _read(part)
            if (metadata.get("split.no"), metadata.get("split.count")) != (index, count):
                raise ModelError(f"{part}: is not part {index + 1} of {count}, as its name says")
            if both := tensors.keys() & self.tensors.keys():
                raise ModelError(f"{part}: tensor {min(both)} is in an earlier part, too")
            self.tensors |= tensors
        if len(self.tensors) != (announced := self._split("tensors.count", len(self.tensors))):
            raise ModelError(
                f"{self.path}: its {count} parts have {len(self.tensors)} tensors, but should have {announced}"
            )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata and tensors of one file."""
    reader = _Reader(path, _map(path))
    num_tensors, num_entries = reader.header()
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = reader.string("a metadata key")
        metadata[key] = reader.value(f"metadata {key!r}")
    return metadata, reader.tensors(num_tensors, _alignment(path, metadata))


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path}: general.alignment must be a power of two, not {alignment!r}")
    return alignment


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # copy on write: torch may wrap views
    except ValueError:
        raise ModelError(f"{path}: the file is empty, not a GGUF model") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Reader:
    """A cursor over the map. Every read names what it is reading, for the message if the file ends there."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._path = path
        self._buffer = buffer
        self._size = len(buffer)
        self._at = 0

    def header(self) -> tuple[int, int]:
        """Number of tensors, number of metadata entries."""
        if self._buffer[:4] != _MAGIC:
            self._fail(f"not a GGUF file: it starts with {self._buffer[:4]!r}, not {_MAGIC!r}")
        self._at = 4
        version = self._unpack(_U32, "the version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in _VERSIONS:
                self._fail("a big-endian GGUF file; only little-endian ones are supported")
            self._fail(f"GGUF version {version} is not supported; supported: {', '.join(map(str, _VERSIONS))}")
        return self._unpack(_U64, "the tensor count"), self._unpack(_U64, "the metadata count")

    def string(self, what: str) -> str:
        raw = self._bytes(self._unpack(_U64, what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._fail(f"corrupt: {what} is not UTF-8")

    def value(self, what: str, type_id: int | None = None) -> Any:
        if type_id is None:
            type_id = self._unpack(_U32, what)
        if type_id == _STRING:
            # Vocabularies may hold pieces that are not UTF-8; one odd piece does not make a model unusable.
            return self._bytes(self._unpack(_U64, what), what).decode(errors="replace")
        if type_id == _ARRAY:
            return self._array(what)
        if type_id not in _SCALARS:
            self._fail(f"corrupt: {what} has the unknown value type {type_id}")
        return self._unpack(_SCALARS[type_id][0], what)

    def tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        """All tensor entries; their bytes start at the next aligned place after the last entry."""
        entries = [self._tensor_entry() for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_, offset in entries:
            if name in tensors:
                self._fail(f"corrupt: tensor {name} is listed twice")
            if offset % alignment:
                self._fail(f"corrupt: tensor {name} starts at {offset}, not a multiple of {alignment}")
            begin, num_bytes = start + offset, self._num_bytes(name, shape, type_)
            if num_bytes and begin + num_bytes > self._size:
                self._fail(f"truncated: tensor {name} ends at byte {begin + num_bytes} but the file has {self._size}")
            data = np.frombuffer(self._buffer, np.uint8, num_bytes, begin) if num_bytes else np.empty(0, np.uint8)
            tensors[name] = GGUFTensor(name, shape, type_, data)
        return tensors

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLType, int]:
        name = self.string("a tensor name")
        what = f"the entry of tensor {name}"
        num_dims = self._unpack(_U32, what)
        if num_dims > _MAX_DIMS:
            self._fail(f"corrupt: tensor {name} has {num_dims} dimensions")
        dims = tuple(self._unpack(_U64, what) for _ in range(num_dims))
        type_id, offset = self._unpack(_U32, what), self._unpack(_U64, what)
        if type_id not in _TYPES:
            self._fail(f"tensor {name} has the unknown type {type_id}")
        return name, dims[::-1], _TYPES[type_id], offset

    def _num_bytes(self, name: str, shape: tuple[int, ...], type_: GGMLType) -> int:
        block = type_.block_numbers
        row = shape[-1] if shape else 1
        if row % block:
            self._fail(f"corrupt: rows of tensor {name} have {row} numbers, not a multiple of {type_.name}'s {block}")
        return math.prod(shape) // block * type_.block_bytes

    def _array(self, what: str, depth: int = 1) -> Any:
        if depth > _MAX_ARRAY_DEPTH:
            self._fail(f"corrupt: {what} has arrays inside each other, more than {_MAX_ARRAY_DEPTH} levels")
        type_id, count = self._unpack(_U32, what), self._unpack(_U64, what)
        if type_id == _STRING:
            return self._strings(count, what)
        if type_id == _ARRAY:
            return [self._array(what, depth + 1) for _ in range(self._checked(count, 12, what))]
        if type_id not in _SCALARS:
            self._fail(f"corrupt: {what} is an array of the unknown value type {type_id}")
        dtype = np.dtype(_SCALARS[type_id][1])
        return np.frombuffer(self._bytes(count * dtype.itemsize, what), dtype)

    def _strings(self, count: int, what: str) -> list[str]:
        """The hot loop of a start: a vocabulary and its merges are some 100,000 strings."""
        self._checked(count, 8, what)
        buffer, at, size, length_at = self._buffer, self._at, self._size, _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + length_at(buffer, at)[0]
                if at > size:
                    self._fail(f"truncated: the file ends inside {what}")
                append(buffer[begin:at].decode("utf-8", "replace"))
        except struct.error:
            self._fail(f"truncated: the file ends inside {what}")
        self._at = at
        return strings

    def _checked(self, count: int, least_bytes: int, what: str) -> int:
        """`count` elements of at least so many bytes must still fit: refuse absurd counts before looping over them."""
        if count * least_bytes > self._size - self._at:
            self._fail(
                f"truncated: {what} should hold {count} elements but only {self._size - self._at} bytes are left"
            )
        return count

    def _unpack(self, layout: struct.Struct, what: str) -> Any:
        try:
            (value,) = layout.unpack_from(self._buffer, self._at)
        except struct.error:
            self._fail(f"truncated: the file ends inside {what}")
        self._at += layout.size
        return value

    def _bytes(self, count: int, what: str) -> bytes:
        if count > self._size - self._at:
            self._fail(f"truncated: {what} should have {count} bytes but only {self._size - self._at} are left")
        self._at += count
        return self._buffer[self._at - count : self._at]

    def _fail(self, problem: str) -> NoReturn:
        raise ModelError(f"{self._path}: {problem}")
