"""Names for prefixes: the hash of a block covers its tokens, all tokens before it, and the tenant's salt."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_digest(salt: bytes) -> bytes:
    """The parent of a sequence's first block. Equal prompts under different salts share nothing."""
    return hashlib.blake2b(salt, digest_size=16, person=b"tonle-kv").digest()


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """16 bytes: collisions are out of reach even for somebody who picks prompts on purpose."""
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()
