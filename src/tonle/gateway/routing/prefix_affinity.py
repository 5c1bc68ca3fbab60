"""Who has seen a beginning like this? Prompts that share one go where its keys and values still are.

Does: remember which backend got which beginnings, find the longest match, and give strangers a consistent first home.
Does not: know loads; `router.py` bounds the affinity by them.

A prompt is cut into pieces of `PIECE_CHARS`; each piece's name covers all before it and the owner's salt, as in an
engine's prefix cache.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

PIECE_CHARS = 256  # about 64 tokens of English
MAX_PIECES = 64  # of one prompt; longer beginnings are alike enough
MAX_NAMES = 50_000  # remembered; about 8 MB


def piece_names(text: str, salt: str) -> list[bytes]:
    """One name per whole piece of the beginning; of a short text, one for all of it."""
    names, parent = [], hashlib.blake2b(salt.encode(), digest_size=16).digest()
    for start in range(0, max(1, min(len(text), PIECE_CHARS * MAX_PIECES)), PIECE_CHARS):
        piece = text[start : start + PIECE_CHARS]
        if len(piece) < PIECE_CHARS and start:
            break
        parent = hashlib.blake2b(parent + piece.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        names.append(parent)
    return names


def first_home(name: bytes, backends: Iterable[str]) -> str:
    """The same for every gateway, and for most names still the same when a backend comes or goes (rendezvous)."""
    return max(backends, key=lambda backend: hashlib.blake2b(name + backend.encode(), digest_size=8).digest())


class PrefixMemory:
    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._homes: OrderedDict[bytes, str] = OrderedDict()  # least recently used first

    def longest(self, names: Sequence[bytes], backends: set[str]) -> tuple[str | None, int]:
        """The backend that got the longest beginning of this, and how many pieces."""
        for count in range(len(names), 0, -1):
            home = self._homes.get(names[count - 1])
            if home in backends:
                return home, count
        return None, 0

    def remember(self, names: Sequence[bytes], backend: str) -> None:
        for name in names:
            self._homes[name] = backend
            self._homes.move_to_end(name)
        while len(self._homes) > self._max_names:
            self._homes.popitem(last=False)


class PrefixBlocks:
    """Which KV block of a backend a beginning of a text ends in: learnt from what that backend told of such a prompt.

    It tells of blocks at even distances. Where in the text one ends is taken from its share of the prompt: a template's own
    tokens shift that a little, which costs a part of a match at most.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._blocks: OrderedDict[tuple[bytes, str], int] = OrderedDict()  # least recently learnt first

    def learn(self, names: Sequence[bytes], num_chars: int, backend: str, blocks: Sequence[int]) -> None:
        """`names` of the pieces of a text of `num_chars`; `blocks` of its prompt, at even distances."""
        for number, name in enumerate(names, 1):
            place = len(blocks) * min(PIECE_CHARS * number, num_chars) // max(1, num_chars)
            if place:
                self._blocks[name, backend] = blocks[place - 1]
                self._blocks.move_to_end((name, backend))
        while len(self._blocks) > self._max_names:
            self._blocks.popitem(last=False)

    def find(self, name: bytes, backend: str) -> int | None:
        """None: it has never answered a text that begins so, or not told."""
        return self._blocks.get((name, backend))
