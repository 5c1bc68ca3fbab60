"""`SentenceSplitter`: a text that still grows into sentences, each as soon as it is known to have ended.

    splitter = SentenceSplitter()
    for piece in ("Hello. My name ", "is Dr. Sok. Wel", "come!"):
        for sentence in splitter.push(piece): ...      # "Hello. " after the first piece
    splitter.end()                                     # what is left

Does: find ends in Latin, Cyrillic, Khmer, Thai, Lao, Arabic, Devanagari, Burmese, Chinese and Japanese texts; keep every letter,
so that the sentences joined are the text, and the same however it was cut into pieces; say what of a sentence is spoken
(`speakable`). Does not: know grammar: where a rule cannot tell, two sentences stay one.

dashboard/static/pages/sentences.js does the same in a browser; tests/fakes/sentences.json holds both to the same cases.
"""

from __future__ import annotations

import re
import unicodedata

MAX_CHARS = 240  # no sentence is longer: a speaker must not wait for a text without ends, nor a buffer grow with it
PHRASE_CHARS = (
    30  # Thai and Lao end sentences with a space, and shorter phrases, too: shorter pieces than this are not cut
)

SPACES = frozenset(" \t\r\n\u00a0\u200b\u3000")
STRONG = frozenset("។៕。｡！？؟۔।॥။።")  # an end whatever follows
WEAK = frozenset(".!?…")  # an end where a space follows, and then no small letter
MARKS = STRONG | WEAK
CLOSING = frozenset("\"'”’»)]}*_」』】）》〉›")  # belong to the sentence that they follow
KHMER_AND_SO_ON = "។ល។"  # "etc."
THAI_REPEAT = "ๆ"  # "the word before, again": what follows belongs to it

# Words that a full stop belongs to, in small letters. "etc." and the like are not among them: they may end a sentence.
ABBREVIATIONS = frozenset({
    "mr", "mrs", "ms", "dr", "prof", "st", "mt", "gen", "sen", "rep", "rev", "hon", "capt", "lt", "col", "sgt", "vs", "nos",
    "fig", "figs", "vol", "vols", "pp", "eq", "ch", "dept", "approx", "ca", "cf", "viz", "jan", "feb", "apr", "jun", "jul", "aug",
    "sep", "sept", "oct", "nov", "dec", "mme", "mlle", "sr", "sra", "srta", "dra", "hr", "fr", "nr", "bzw", "tel", "tp", "ths",
})  # fmt: skip
_WORD = re.compile(r"[^\W\d_](?:[^\W\d_]|\.)*\Z")  # the letters, and dots between them, right before a full stop
_LIST_NUMBER = re.compile(r"\s*(?:[-*#>]+\s*)?\d{1,3}\Z")  # "1." at the beginning of a line of a list
_EMPHASIS = re.compile(r"`+|\*+(?=\S)|(?<=\S)\*+|\b_+|_+\b")
_BEGINNING = re.compile(r"\s*(?:[-•>*]+|#{1,6})\s")  # of a line: a bullet, a heading


class SentenceSplitter:
    """Of one text."""

    def __init__(self) -> None:
        self._text = ""  # begun, not ended: never longer than `MAX_CHARS` after a call

    def push(self, piece: str) -> list[str]:
        """The sentences that end in `piece`, each with the space after it if that is known."""
        self._text += piece
        found = []
        start = 0
        while (length := first_end(self._text[start : start + MAX_CHARS])) is not None:
            found.append(self._text[start : start + length])
            start += length
        self._text = self._text[start:]
        return found

    def end(self) -> list[str]:
        """The text is complete: the sentence that was begun, if there is one."""
        rest, self._text = self._text, ""
        return [rest] if rest else []


def sentences_of(text: str) -> list[str]:
    """Of a text that is complete. Joined they are the text."""
    splitter = SentenceSplitter()
    return [*splitter.push(text), *splitter.end()]


def speakable(sentence: str) -> str:
    """Without marks of Markdown and spaces around; empty if there is no letter or digit to speak."""
    begun = _BEGINNING.match(sentence)
    plain = _EMPHASIS.sub("", sentence[begun.end() if begun else 0 :]).strip("".join(SPACES))
    return plain if any(letter.isalnum() for letter in plain) else ""


def first_end(window: str) -> int | None:
    """Letters of the first sentence in `window`; None: it cannot be known before more letters come. A window of `MAX_CHARS` is
    not waited for: it is cut."""
    for at, letter in enumerate(window):
        end: int | None = 0
        if letter == "\n":
            end = at + 1 if window[:at].strip() else 0
        elif letter in MARKS and not (at and window[at - 1] in MARKS):  # a run is looked at from its first mark
            end = _end_by_marks(window, at)
        elif letter == " " and at >= PHRASE_CHARS and _is_thai(window[at - 1]) and window[at - 1] != THAI_REPEAT:
            after = _skip(window, at, SPACES)
            end = None if after == len(window) else at + 1 if _is_thai(window[after]) else 0
        if end is None:
            break
        if end:
            return end
    return None if len(window) < MAX_CHARS else _cut(window)


def _end_by_marks(window: str, at: int) -> int | None:
    """Of the sentence that the marks from `at` on end; 0: they end none; None: more letters are needed."""
    after = _skip(window, at + 1, MARKS | CLOSING)
    if after == len(window):
        return None  # more marks may follow
    if any(mark in STRONG for mark in window[at:after]):
        if KHMER_AND_SO_ON.startswith(window[at : at + 3]) and after == at + 1:
            return None if len(window) < at + 3 else 0
        return after
    if window[after] not in SPACES:  # 3.14, example.org; but scripts without capitals are often written without spaces
        return after if window[at] in "!?" and unicodedata.category(window[after]) == "Lo" else 0
    if window[at] == "." and after == at + 1 and _is_abbreviation(window[:at]):
        return 0
    following = _skip(window, after, SPACES)
    if "\n" in window[after:following]:
        return after + 1
    if following == len(window):
        return None
    return 0 if unicodedata.category(window[following]) == "Ll" else after + 1


def _is_abbreviation(before: str) -> bool:
    """Of the text before a full stop: "Dr", "J", "e.g", or the number of a list."""
    if _LIST_NUMBER.fullmatch(before.rpartition("\n")[2]):
        return True
    found = _WORD.search(before)
    if found is None:
        return False
    word = found[0]
    letters = word.split(".")
    is_initials = all(len(each) == 1 and each.lower() != each.upper() for each in letters)
    return is_initials or word.lower() in ABBREVIATIONS


def _is_thai(letter: str) -> bool:
    """Or Lao."""
    return "\u0e00" <= letter <= "\u0eff"


def _skip(window: str, at: int, letters: frozenset[str]) -> int:
    while at < len(window) and window[at] in letters:
        at += 1
    return at


def _cut(window: str) -> int:
    """Where a piece without an end is cut: after a space in its second half, else before a letter with no marks on it."""
    for at in range(len(window) - 1, len(window) // 2, -1):
        if window[at] in SPACES:
            return at + 1
    at = len(window) - 1
    while at > 1 and (unicodedata.category(window[at])[0] == "M" or window[at - 1] in "\u17d2\u200d"):
        at -= 1
    return at if at > 1 else len(window)
