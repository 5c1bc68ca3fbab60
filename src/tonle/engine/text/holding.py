"""Which end of a growing text waits for what comes next.

A letter may be several code points, and the next one may still belong to the last letter. Two ways to deal with it:

    always   the last cluster waits until the next one begins (`graphemes.safe_length`): no text is ever cut inside a
             letter. The price is that the last letter of every English token goes out with the next token.
    auto     the last cluster waits only where a joining code point is likely to follow. Whatever is not listed below
             waits, so a script that is missing from the list costs a token of delay and breaks nothing.

With auto, nothing waits after these, the calm characters:

    ASCII                    but for CR, which may become CR LF
    Latin, Greek, Cyrillic,  their accented letters have code points of their own, and nearly all text uses those
    Armenian, Georgian
    Han, kana, Bopomofo      variation selectors after ideographs and voicing marks after kana are rare; half-width
                             katakana, whose voicing marks are always separate, do wait
    Hangul syllables         jamo, of which syllables are made, do wait
    punctuation, symbols     Latin-1, General Punctuation, currency, arrows, mathematics, box drawing, CJK punctuation;
                             not those that are emoji as well, such as the heart U+2764

A mark after a calm character says that this text writes letters as base and mark (decomposed Latin, for example), and
from there on the stream is treated as with `always`. The prompt is searched for such marks, too. Keycap emoji are
common in texts that are otherwise plain, so the selectors after a digit make only digits, # and * wait. What auto can
break is therefore the very first decomposed letter of a text that never had one, and its first keycap.

Does: decide. Does not: hold the text; `stream.py` does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import regex

from tonle.engine.text.graphemes import safe_length
from tonle.errors import ConfigError

_CALM_CLASS = r"""[
    [\p{ASCII}\p{Latin}\p{Greek}\p{Cyrillic}\p{Armenian}\p{Georgian}\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}
     \p{GCB=LV}\p{GCB=LVT}\u00A0-\u00FF\u2000-\u200A\u2010-\u2027\u202F-\u205F\u2070-\u20CF\u2100-\u2BFF
     \u3000-\u30FF\uFF00-\uFF65\uFFE0-\uFFEF\uFFFD]
    --[\p{M}\p{GCB=Control}\p{GCB=Extend}\p{GCB=Prepend}\p{Extended_Pictographic}\r\n\uFF66-\uFF9F]
]"""
_CONTROL_CLASS = r"[\p{GCB=Control}\n]"
_MARK_CLASS = r"[\p{M}\p{GCB=Extend}\p{GCB=SpacingMark}\p{GCB=ZWJ}\p{GCB=V}\p{GCB=T}]"
_FLAGS = regex.VERSION1 | regex.VERBOSE | regex.DOTALL

_CALM, _CONTROL, _MARK = 1, 2, 3  # kinds of characters: calm; takes no marks; joins what stands before it
_KINDS: Any = regex.compile(rf"({_CALM_CLASS})|({_CONTROL_CLASS})|({_MARK_CLASS})|(.)", _FLAGS)
# The mark first, then what it sits on: text without marks is searched fast.
_MARKED: Any = regex.compile(rf"{_MARK_CLASS}(?<={_CALM_CLASS}.)", _FLAGS)

_CALM_ASCII = frozenset(map(chr, range(128))) - {"\r"}
_KEYCAPS = frozenset("0123456789#*")
_KEYCAP_MARKS = frozenset("\ufe0e\ufe0f\u20e3")


@lru_cache(maxsize=4096)
def _kind(char: str) -> int:
    kind: int = _KINDS.match(char).lastindex
    return kind


class Holding:
    """The decision for one stream, which learns from the stream's text."""

    __slots__ = ("_always", "calm_ascii")

    def __init__(self, hold_clusters: str, *, prompt: str = "") -> None:
        if hold_clusters not in ("auto", "always"):
            raise ConfigError(f"hold_clusters {hold_clusters!r} is none of auto, always", param="hold_clusters")
        self._always = hold_clusters == "always"
        self.calm_ascii = frozenset[str]() if self._always else _CALM_ASCII  # nothing waits after these
        if not self._always and not prompt.isascii():
            for match in _MARKED.finditer(prompt):
                self._learn(match.group())

    def safe_length(self, text: str, num_new: int) -> int:
        """How much of `text` may be shown. It starts where the last call said; its last `num_new` characters are new."""
        if not (self._always or text.isascii()):
            self._look_for_marks(text, len(text) - num_new)
        last = text[-1]
        if last in self.calm_ascii if last.isascii() else not self._always and _kind(last) <= _CONTROL:
            return len(text)
        return safe_length(text)

    def _look_for_marks(self, text: str, num_old: int) -> None:
        # All that was shown before ends in a calm character, or in one that takes no marks.
        before = _kind(text[num_old - 1]) if num_old else _CALM
        for char in text[num_old:]:
            kind = _kind(char)
            if before == _CALM and kind == _MARK:
                self._learn(char)
            before = kind

    def _learn(self, mark: str) -> None:
        """A calm character was joined by this mark."""
        if mark in _KEYCAP_MARKS:
            self.calm_ascii -= _KEYCAPS
        else:
            self._always = True
            self.calm_ascii = frozenset()
