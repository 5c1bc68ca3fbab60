"""One KV block as it is stored outside of this process: a header that says what it is, then its bytes.

A block that is too short, too long, damaged, or another's is no block: whoever reads it misses.
"""

from __future__ import annotations

import struct
import zlib

KEY_BYTES = 32  # the namespace of a model and its kernels, then the digest of the block
_HEADER = struct.Struct("<8s32sQI")  # magic, key, bytes, CRC-32 of them
_MAGIC = b"TonleKV1"
HEADER_BYTES = _HEADER.size


def header_of(key: bytes, data: memoryview) -> bytes:
    return _HEADER.pack(_MAGIC, key, len(data), zlib.crc32(data))


def is_whole(header: bytes, key: bytes, data: memoryview) -> bool:
    """Whether `data` is all of the block `key`, as it was written."""
    if len(header) != HEADER_BYTES:
        return False
    magic, named, size, checksum = _HEADER.unpack(header)
    return (magic, named, size) == (_MAGIC, key, len(data)) and zlib.crc32(data) == checksum
