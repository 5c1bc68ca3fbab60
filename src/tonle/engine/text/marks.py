"""Marks: what stands for special tokens while a chat template runs, so that a caller's text cannot become one.

A template writes `<|im_end|>` to end a turn; a caller may write the same characters. The template is compiled with a mark
in place of each special token it names, so that in what it renders the marks are its own tokens, and a special token's
text is the caller's, however it came together. A mark is random, new in each process, and shown to no caller.

Does: special tokens to marks and back, prompts with marks to tokens. Does not: render.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable

from tokenizers import AddedToken, Tokenizer

from tonle.errors import InvalidRequest

_PRIVATE = 0xF0000  # Unicode's first plane for private use: 65,534 characters
_NUM_RANDOM = 5  # characters of a mark that are random: 80 bits
# Some tokenizers fail to flag their control tokens; these are written like nothing else.
_LOOKS_SPECIAL = re.compile(r"<[|｜][^<>]*[|｜]>")


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The tokens that text should not turn into, by their text: those flagged as special, and those that look so."""
    added = tokenizer.get_added_tokens_decoder()
    special = (item for item in added.items() if item[1].special or _LOOKS_SPECIAL.fullmatch(item[1].content))
    return {entry.content: token for token, entry in special}


class Marks:
    """A mark for each of `texts`."""

    def __init__(self, texts: Iterable[str]) -> None:
        secret = _random_text()
        self.of = {text: f"{secret}{chr(_PRIVATE + number)}" for number, text in enumerate(dict.fromkeys(texts))}
        self._texts = {mark: text for text, mark in self.of.items()}
        self.pattern = re.compile(f"({secret}.)", re.DOTALL)
        self._text_pattern = any_of(self.of)

    def hide(self, text: str) -> str:
        """With marks in place of special tokens."""
        return self._text_pattern.sub(lambda found: self.of[found[0]], text)

    def show(self, text: str) -> str:
        """With special tokens in place of marks."""
        return self.pattern.sub(lambda found: self._texts[found[0]], text)

    def is_mark(self, text: str) -> bool:
        return text in self._texts

    def texts_in(self, prompt: str) -> set[str]:
        """The special tokens that `prompt` has as text."""
        return set(self._text_pattern.findall(prompt))

    def any_text_in(self, prompt: str) -> bool:
        return self._text_pattern.search(prompt) is not None


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """The longest of them at the first place where one is, as tokenizers find them; nothing if there are none."""
    longest_first = sorted((re.escape(text) for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(longest_first) or r"(?!)")


def _random_text() -> str:
    return "".join(chr(_PRIVATE + secrets.randbelow(0xFFFD)) for _ in range(_NUM_RANDOM))


class MarkedEncoder:
    """Prompts with marks to tokens: a mark is its special token, and a special token's text is text.

    It is the tokenizer with marks for special tokens: words are cut, and spaces kept, as the tokenizer itself does.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Marks) -> None:
        self._marks = marks
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.content in marks.of}
        self._tokenizer = _with_marks(tokenizer, [_renamed(entry, marks) for entry in added.values()])
        renamed = ((token, marks.of.get(entry.content, entry.content)) for token, entry in added.items())
        self._ids = {self._tokenizer.token_to_id(text): token for token, text in renamed}
        folds = any(entry.normalized for token, entry in added.items() if token in self._special)
        self._normalizer = tokenizer.normalizer if folds else None

    def is_needed(self, prompt: str) -> bool:
        """Whether the tokenizer itself would find special tokens in the text between the marks."""
        if self._marks.any_text_in(prompt):
            return True
        return self._normalizer is not None and self._marks.any_text_in(self._normalizer.normalize_str(prompt))

    def encode(self, prompt: str) -> list[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([prompt], add_special_tokens=False)
        found: list[int] = encoding.ids
        tokens = [self._ids.get(token, token) for token in found]
        num_special = sum(token in self._special for token in tokens)
        if num_special != len(self._marks.pattern.findall(prompt)):  # a tokenizer that needs no added token for them
            raise cannot_be_text()
        return tokens


def encode_pieces(prompt: str, marks: Marks, encode: Callable[[str], list[int]], ids: dict[str, int]) -> list[int]:
    """As `MarkedEncoder.encode`, for a tokenizer of which only `encode` is known. `ids`: of the special tokens."""
    tokens: list[int] = []
    special = set(ids.values())
    for piece in marks.pattern.split(prompt):
        if marks.is_mark(piece):
            tokens.append(ids[marks.show(piece)])
        elif piece:
            found = encode(piece)
            if not special.isdisjoint(found):
                raise cannot_be_text()
            tokens += found
    return tokens


def cannot_be_text() -> InvalidRequest:
    return InvalidRequest(
        "messages contain a special token of the model, which cannot be written as text with its tokenizer; remove it",
        param="messages",
    )


def _with_marks(tokenizer: Tokenizer, added: list[AddedToken]) -> Tokenizer:
    """A second tokenizer over the same vocabulary, which is not copied."""
    made = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        made.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        made.pre_tokenizer = tokenizer.pre_tokenizer
    made.add_tokens(added)
    return made


def _renamed(entry: AddedToken, marks: Marks) -> AddedToken:
    return AddedToken(
        marks.of.get(entry.content, entry.content),
        single_word=entry.single_word,
        lstrip=entry.lstrip,
        rstrip=entry.rstrip,
        normalized=entry.normalized,
        special=False,
    )
