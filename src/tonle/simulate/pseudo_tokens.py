"""Pseudo tokens: numbers in place of a text's tokens, where no tokenizer is at hand.

Does: cut a text into pieces and name each by a hash, so that texts that begin alike have ids that begin alike, and prefixes are
found as an engine would find them. Does not: know where a tokenizer would cut: counts are estimates unless they are given.
"""

from __future__ import annotations

import hashlib
import zlib

from tonle.gateway.parsed_request import ASCII_PER_TOKEN, BYTES_PER_TOKEN
from tonle.simulate.trace import ANSWER_IDS, answer_ids

_IDS = ANSWER_IDS - 1  # a mask: ids of prompts are below those of answers


def text_ids(text: str) -> list[int]:
    """About as many as a tokenizer gives, by the gateway's rule: four ASCII characters, or three bytes of other scripts, each."""
    data = text.encode("utf-8", "surrogatepass")
    size = ASCII_PER_TOKEN if text.isascii() else BYTES_PER_TOKEN
    return [zlib.crc32(data[start : start + size]) & _IDS for start in range(0, len(data), size)] or [0]


class RecordedPrompts:
    """Prompts of known lengths, in the order in which they came. One that goes on from an earlier one and its answer, as the next
    turn of a chat does, begins with its ids and those of its answer."""

    def __init__(self, chars_per_token: float) -> None:
        """The same for all, so that equal beginnings are cut alike."""
        self._chars_per_token = max(chars_per_token, 0.25)
        self._known: dict[
            bytes, tuple[list[int], int, int]
        ] = {}  # digest of a text -> ids, place in the trace, answer's tokens

    def ids(self, text: str | None, count: int, owner: str, index: int, output_tokens: int) -> list[int]:
        """`count` ids for the prompt at place `index`. None: it is not on record, and shares nothing."""
        if text is None:
            return [(zlib.crc32(b"%d" % index) + place) & _IDS for place in range(count)]
        before, rest = self._longest(text, count, owner)
        ids = before + self._cut(rest, count - len(before))
        self._known[_digest(owner, text)] = (ids, index, output_tokens)
        return ids

    def _longest(self, text: str, count: int, owner: str) -> tuple[list[int], str]:
        """Ids of the longest earlier prompt, with its answer, that this one begins with; and what comes after them."""
        hasher = hashlib.blake2b(owner.encode() + b"\0", digest_size=16)
        found: tuple[list[int], int, int] | None = None
        begin = end = 0
        for line in text.splitlines(keepends=True):
            hasher.update(line.rstrip("\n").encode("utf-8", "surrogatepass"))
            begin += len(line)
            known = self._known.get(hasher.digest()) if begin < len(text) else None
            if known is not None and len(known[0]) + known[2] < count:
                found, end = known, begin
            if line.endswith("\n"):
                hasher.update(b"\n")
        if found is None:
            return [], text
        ids, index, output_tokens = found
        # The recorded answer stands in this text too; its characters are not counted a second time.
        answer_chars = int(output_tokens * self._chars_per_token)
        return ids + answer_ids(index, output_tokens), text[min(end + answer_chars, len(text)) :]

    def _cut(self, text: str, count: int) -> list[int]:
        """As many as asked for. The last one depends on the whole text: texts that differ anywhere are not taken for the same."""
        size = self._chars_per_token
        ids = [
            zlib.crc32(text[int(place * size) : int((place + 1) * size)].encode("utf-8", "surrogatepass")) & _IDS
            for place in range(count - 1)
        ]
        return [*ids, zlib.crc32(text.encode("utf-8", "surrogatepass")) & _IDS]


def _digest(owner: str, text: str) -> bytes:
    return hashlib.blake2b(owner.encode() + b"\0" + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
