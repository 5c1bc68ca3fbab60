"""The bytes each token stands for.

Two spellings cover nearly every model that generates text: byte-level (GPT-2's alphabet of 256 printable characters)
and metaspace (SentencePiece: ▁ for a space, <0xNN> for a byte). In both, a text is the bytes of its tokens one after
the other, which makes decoding a lookup. Any other spelling is left to the tokenizer's own decoder (see `codec.py`).

Does: recognise the spelling, look pieces up once. Does not: join pieces.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Alphabet(enum.Enum):
    BYTE_LEVEL = "byte_level"
    METASPACE = "metaspace"


@dataclass(frozen=True, slots=True)
class Spelling:
    alphabet: Alphabet
    drops_first_space: bool  # the tokenizer puts a space before a text and takes it away when decoding


def spelling_of(tokenizer: Tokenizer) -> Spelling | None:
    """How the tokens of this tokenizer are written, or None where its decoder does more than join pieces."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(Alphabet.BYTE_LEVEL, drops_first_space=False)
    if kinds == ["Metaspace"] and steps[0]["replacement"] == "▁":
        return Spelling(Alphabet.METASPACE, drops_first_space=steps[0].get("prepend_scheme", "always") != "never")
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _is_metaspace(steps[0]):
        strips = [(step.get("content"), step.get("start"), step.get("stop")) for step in steps[3:]]
        if strips in ([], [(" ", 1, 0)]):
            return Spelling(Alphabet.METASPACE, drops_first_space=bool(strips))
    return None


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())  # its JSON form, without the vocabulary
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _is_metaspace(step: dict[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": "▁"} and step["content"] == " ")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's character -> the byte it writes: printable Latin-1 is itself, the rest is shifted up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = (byte for byte in range(256) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(shifted)}


class Pieces(dict[int, bytes]):
    """Token -> its bytes, filled on first use. Tokens of `skipped` and ids no token has stand for nothing.

    Shared by all streams of a model and all threads: an entry is always computed to the same value.
    """

    def __init__(self, tokenizer: Tokenizer, alphabet: Alphabet, *, skipped: Iterable[int] = ()) -> None:
        super().__init__(dict.fromkeys(skipped, b""))
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._bytes_of = byte_alphabet() if alphabet is Alphabet.BYTE_LEVEL else None
        self.texts = _Texts(self)

    def __missing__(self, token: int) -> bytes:
        self[token] = piece = self._look_up(token)
        return piece

    def _look_up(self, token: int) -> bytes:
        if token in self._added:  # written as they are, whatever the alphabet
            return self._added[token].encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:  # models pad their vocabulary beyond the tokenizer's
            return b""
        if self._bytes_of is not None:
            try:
                return bytes([self._bytes_of[char] for char in text])
            except KeyError:
                return text.encode()
        if match := _BYTE_PIECE.fullmatch(text):
            return bytes([int(match.group(1), 16)])
        return text.replace("▁", " ").encode()


class _Texts(dict[int, str | None]):
    """Token -> its text, where its bytes are whole characters; None where they are not. Filled on first use, too."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token: int) -> str | None:
        try:
            text: str | None = self._pieces[token].decode()
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text
