"""The header in which a replica tells a gateway which KV blocks a prompt has, so that the gateway learns where a text's are.

Does: choose a few blocks at even distances, and write their hashes. A block's hash covers everything before it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

KV_BLOCKS_HEADER = "x-tonle-kv-blocks"
MAX_TOLD = 64  # blocks of one prompt
_HASH_BYTES = 8  # of each: its last ones


def write_blocks(digests: Sequence[bytes]) -> str:
    """Of the blocks at 1/n, 2/n, … of the prompt, n at most `MAX_TOLD`; base64."""
    count = min(len(digests), MAX_TOLD)
    told = [digests[len(digests) * (i + 1) // count - 1] for i in range(count)]
    return base64.b64encode(b"".join(digest[-_HASH_BYTES:] for digest in told)).decode()


def read_blocks(text: str) -> list[int]:
    """The last 8 bytes of each block's hash as a number, or nothing if it is no such text."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return []
    if len(data) % _HASH_BYTES or len(data) > MAX_TOLD * _HASH_BYTES:
        return []
    return [int.from_bytes(data[i : i + _HASH_BYTES], "big") for i in range(0, len(data), _HASH_BYTES)]
