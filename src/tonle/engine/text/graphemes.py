"""Letters as a reader sees them: where text may be cut, and how much of a growing text may be shown.

The rule is Unicode's extended grapheme clusters (UAX #29, by the `regex` module's \\X), joined further wherever that
rule still cuts through one written letter:

    stackers   Khmer COENG, Myanmar U+1039, Tai Tham SAKOT, ...: invisible alone, they hold on to the letter that
               follows, with or without ZWJ / ZWNJ between
    viramas    Devanagari, Bengali, Gujarati, Telugu, Kannada, Malayalam, Balinese, Javanese, ...: virama + consonant
               is one conjunct; ZWNJ after the virama asks for a visible one, and a cut is right there
    Sinhala    only with ZWJ, which is how Sinhala writes conjuncts
    Tamil      only KSSA and SHRI, the conjuncts modern Tamil has
    marks      no mark (category M) is ever cut from what it sits on, also those UAX #29 lets go (Myanmar AA, VISARGA)

What is still to come can change only the last cluster: every rule above looks at one code point to the right of a
cut. So `safe_length` holds back exactly the last cluster, and nothing after a line feed or control character, which
takes no marks. Where less may be held back is said in `holding.py`.

Does: find boundaries. Does not: normalize, segment words, or know of tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import regex

_SHORT = 16  # code points; what waits in a stream is hardly ever longer, and the same letters come again and again
MAX_CLUSTER = 64  # code points; what is longer is no letter but a model repeating a mark, and is let go, not held

_VIRAMA = r"[\p{InSC=Virama}\p{InSC=Consonant_With_Stacker}--[\u0BCD\u0DCA]]"
_STACKER = r"\p{InSC=Invisible_Stacker}"
_LETTER = r"[\p{InSC=Consonant}\p{InSC=Vowel_Independent}\p{InSC=Consonant_Dead}\p{InSC=Consonant_With_Stacker}]"

_CLUSTER: Any = regex.compile(
    rf"""
    \X(?:
        (?: (?<= {_STACKER} [\p{{Mn}}\u200C\u200D]* ) (?= \p{{L}} )
          | (?<= {_VIRAMA} [\p{{Mn}}\u200D]* ) (?= {_LETTER} )
          | (?<= \u0DCA\u200D | \u200D\u0DCA ) (?= {_LETTER} )
          | (?<= \u0B95\u0BCD ) (?= \u0BB7 )
          | (?<= [\u0BB6\u0BB8]\u0BCD ) (?= \u0BB0 )
          | (?<! [\p{{GCB=Control}}\r\n] ) (?= \p{{M}} )
        ) \X
    )*+
    """,
    regex.VERSION1 | regex.VERBOSE,
)
_CONTROL: Any = regex.compile(r"\p{GCB=Control}")
_EMOJI = r"[\p{Extended_Pictographic}\p{Emoji_Modifier}\uFE0F]"
_DANGLING: Any = regex.compile(rf"(?:{_STACKER}[\u200C\u200D]*|(?<={_EMOJI})\u200D)+\Z", regex.VERSION1)


def clusters(text: str) -> list[str]:
    """The letters of `text`, in order; joined they are `text`."""
    found: list[str] = _CLUSTER.findall(text)
    return found


def safe_length(text: str) -> int:
    """How much of a text that is still growing may be shown now, whatever comes next.

    `text` must start at a boundary, as the unsent rest of a stream does. The work is proportional to `len(text)`.
    """
    if not text:
        return 0
    last = text[-1]
    if text[-2:].isascii():  # most of the time: between two ASCII characters is a boundary, but for CR LF
        takes_no_marks = last == "\x7f" or (last < " " and last != "\r")
        return len(text) if takes_no_marks else len(text) - 1
    held = _last_length(text) if len(text) <= _SHORT else _last_length.__wrapped__(text)
    return len(text) if held > MAX_CLUSTER else len(text) - held


@lru_cache(maxsize=8192)
def _last_length(text: str) -> int:
    """Of the last cluster, in code points; 0 if nothing can join it."""
    return 0 if _CONTROL.match(text[-1]) else len(clusters(text)[-1])


def floor(text: str, index: int) -> int:
    """The last boundary of `text` at or before `index`."""
    boundary = 0
    for match in _CLUSTER.finditer(text):
        if match.end() > index:
            break
        boundary = match.end()
    return boundary


def is_boundary(text: str, index: int) -> bool:
    """Whether `text` may be cut at `index` without cutting a letter. Both ends are boundaries."""
    return 0 <= index <= len(text) and floor(text, index) == index


def trim(text: str) -> str:
    """`text` without a joiner at its end that waits for a letter that will not come.

    Drops stackers, which show as a dotted circle or a plus sign, and a ZWJ after an emoji. Keeps viramas: they are
    visible and end words rightly in most scripts that have them (अर्थात्, நான், ആണ്). Keeps a lone regional
    indicator, which is a letter.
    """
    match = _DANGLING.search(text[-MAX_CLUSTER:])
    return text[: len(text) - len(match.group())] if match else text
