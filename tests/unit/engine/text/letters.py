"""A second opinion on where text must not be cut, written apart from `graphemes.py` and from the `regex` module.

It knows fewer rules, each stated by code point or general category, and says only what is certainly wrong.
"""

from __future__ import annotations

import unicodedata
from itertools import takewhile

ZWNJ, ZWJ = "\u200c", "\u200d"
STACKERS = set("\u17d2\u1039\u1a60")  # Khmer COENG, Myanmar, Tai Tham
VIRAMAS = set(
    "\u094d\u09cd\u0a4d\u0acd\u0b4d\u0c4d\u0ccd\u0d4d\ua9c0"
)  # not Tamil's and Sinhala's, which mostly end a letter


def cuts_letter(text: str, index: int) -> bool:
    """Whether a cut before `text[index]` shows a reader a broken letter."""
    if not 0 < index < len(text):
        return False
    before, after = text[index - 1], text[index]
    if before == "\r":
        return after == "\n"
    if unicodedata.category(before) in ("Cc", "Zl", "Zp") or before == "\u200b":
        return False
    return (
        unicodedata.category(after).startswith("M")
        or after in (ZWNJ, ZWJ, "\u0e33", "\u0eb3")  # Thai and Lao AM
        or "\U0001f3fb" <= after <= "\U0001f3ff"  # skin tones
        or "\U000e0020" <= after <= "\U000e007f"  # tags of regional flags
        or ("\u1160" <= after <= "\u11a7" and "\u1100" <= before <= "\u11a7")  # vowel jamo
        or ("\u11a8" <= after <= "\u11ff" and "\u1160" <= before <= "\u11ff")  # final jamo
        or _joins(text, index)
        or _is_half_flag(text, index)
        or len(unicodedata.normalize("NFC", before + after)) == 1  # kana with a voicing mark, accents
    )


def _joins(text: str, index: int) -> bool:
    head = text[:index].rstrip(ZWJ)
    if head[-1:] in STACKERS:
        return unicodedata.category(text[index]) == "Lo"
    if head[-1:] in VIRAMAS:
        script = unicodedata.name(head[-1]).split()[0]
        return unicodedata.name(text[index], "").startswith(f"{script} LETTER")
    return text[index - 1] == ZWJ and _is_emoji(text[index]) and _is_emoji(head.rstrip("\ufe0f")[-1:])


def _is_emoji(char: str) -> bool:
    return "\U0001f000" <= char <= "\U0001faff" or "\u2600" <= char <= "\u27bf" or char == "\u2b1b"


def _is_half_flag(text: str, index: int) -> bool:
    def is_indicator(char: str) -> bool:
        return "\U0001f1e6" <= char <= "\U0001f1ff"

    run_before = sum(1 for _ in takewhile(is_indicator, reversed(text[:index])))
    return is_indicator(text[index]) and run_before % 2 == 1
