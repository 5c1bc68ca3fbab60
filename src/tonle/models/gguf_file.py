"""`GGUFFile`: what is in a GGUF file, read through a memory map.

Does: header, metadata, the place and type of every tensor, and a clear refusal of files that are cut short or broken.
Does not: touch tensor bytes (see `load/gguf.py`), know of architectures, or need torch. Reads versions 2 and 3.
"""

from __future__ import annotations

import enum
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from tonle.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32  # bytes; `general.alignment` overrides
_MAX_DIMS = 4

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
    """How the numbers of a tensor are stored."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


# A tensor is a run of blocks: (numbers in a block, bytes of a block).
_BLOCKS: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q8_1: (32, 40),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.MXFP4: (32, 17),
    GGMLType.NVFP4: (64, 36),
    GGMLType.Q1_0: (128, 18),
}


@dataclass(frozen=True, slots=True, eq=False)
class GGUFTensor:
    """One tensor, still in its stored form."""

    name: str
    shape: tuple[int, ...]  # outermost first, as torch counts; the file counts the other way
    type: GGMLType
    data: npt.NDArray[np.uint8]  # the stored bytes, a view into the memory map


class GGUFFile:
    """An open GGUF file. The map is closed when the file and every view into it are gone.

    `metadata` holds Python scalars and strings; arrays of numbers are numpy arrays, arrays of strings are lists.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        reader = _Reader(self.path, _map(self.path))
        num_tensors, num_entries = reader.header()
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = reader.string("a metadata key")
            self.metadata[key] = reader.value(f"metadata {key!r}")
        self.tensors: dict[str, GGUFTensor] = reader.tensors(num_tensors, self._alignment())

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self.path}: general.alignment must be a power of two, not {alignment!r}")
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
            # Vocabularies may hold pieces that are no UTF-8; one odd piece does not make a model unusable.
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
        try:
            return name, dims[::-1], GGMLType(type_id), offset
        except ValueError:
            self._fail(f"tensor {name} has the unknown type {type_id}")

    def _num_bytes(self, name: str, shape: tuple[int, ...], type_: GGMLType) -> int:
        block_numbers, block_bytes = _BLOCKS[type_]
        row = shape[-1] if shape else 1
        if row % block_numbers:
            self._fail(
                f"corrupt: rows of tensor {name} have {row} numbers, no multiple of {type_.name}'s {block_numbers}"
            )
        return math.prod(shape) // block_numbers * block_bytes

    def _array(self, what: str) -> Any:
        type_id, count = self._unpack(_U32, what), self._unpack(_U64, what)
        if type_id == _STRING:
            return self._strings(count, what)
        if type_id == _ARRAY:
            return [self._array(what) for _ in range(self._checked(count, 12, what))]
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
