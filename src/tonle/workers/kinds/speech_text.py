"""Text to be spoken, in pieces: sentences for streaming, and runs of one script, each with its language.

Does: cut, bound the length of a piece, tell languages by their letters. Does not: synthesize.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_PIECE_CHARS = 300  # a sentence that is longer is cut at a comma or a space

_CLOSING = "[\"'”’)»\\]]*"
_END = re.compile(rf"(?<![.!?])[.!?]++{_CLOSING}\s+|[។៕。！？]+{_CLOSING}\s*|\n+")  # 3.50 goes on
_CUTS = (", ", "; ", ": ", "،", "、", "，", " ", "\u200b")

# Blocks of Unicode that tell the language, or the most spoken one that uses the script.
_SCRIPTS = {
    "km": "\u1780-\u17ff\u19e0-\u19ff", "th": "\u0e00-\u0e7f", "lo": "\u0e80-\u0eff", "my": "\u1000-\u109f",
    "ja": "\u3040-\u30ff", "ko": "\uac00-\ud7af\u1100-\u11ff", "cmn": "\u4e00-\u9fff", "ru": "\u0400-\u04ff",
    "el": "\u0370-\u03ff", "ar": "\u0600-\u06ff", "he": "\u0590-\u05ff", "hi": "\u0900-\u097f",
    "bn": "\u0980-\u09ff", "pa": "\u0a00-\u0a7f", "gu": "\u0a80-\u0aff", "or": "\u0b00-\u0b7f", "ta": "\u0b80-\u0bff",
    "te": "\u0c00-\u0c7f", "kn": "\u0c80-\u0cff", "ml": "\u0d00-\u0d7f", "si": "\u0d80-\u0dff",
    "ka": "\u10a0-\u10ff", "am": "\u1200-\u137f", "hy": "\u0530-\u058f",
    "latin": "A-Za-z\u00c0-\u024f",
}  # fmt: skip
_BY_SCRIPT = {language: re.compile(f"[{letters}]") for language, letters in _SCRIPTS.items()}
_RUN = re.compile(
    "|".join(f"(?:[{letters}][^{_SCRIPTS['latin']}\u0370-\u1fff\u3040-\ud7af]*)+" for letters in _SCRIPTS.values())
)


def sentences(text: str) -> list[str]:
    """None of them is empty, or longer than `MAX_PIECE_CHARS`. Together they are the text, but for spaces."""
    found: list[str] = []
    at = 0
    for match in _END.finditer(text):
        found += _short(text[at : match.end()].strip())
        at = match.end()
    return [piece for piece in (*found, *_short(text[at:].strip())) if piece]


def _short(text: str) -> Iterator[str]:
    while len(text) > MAX_PIECE_CHARS:
        window = text[:MAX_PIECE_CHARS]
        at = next(
            (place + len(cut) for cut in _CUTS if (place := window.rfind(cut)) > MAX_PIECE_CHARS // 3), len(window)
        )
        yield text[:at].strip()
        text = text[at:].strip()
    yield text


def runs(text: str, latin: str) -> list[tuple[str, str]]:
    """(language, text) of each run of one script; `latin`: the language of Latin letters, digits and all else."""
    found: list[tuple[str, str]] = []
    japanese = _BY_SCRIPT["ja"].search(text) is not None  # Han letters beside kana are Japanese, too
    at = 0
    for match in _RUN.finditer(text):
        language = next(name for name, letters in _BY_SCRIPT.items() if letters.match(match.group()))
        if language == "cmn" and japanese:
            language = "ja"
        found.append((latin if language == "latin" else language, text[at : match.end()]))
        at = match.end()
    if at < len(text):
        rest = text[at:]
        if found:
            found[-1] = (found[-1][0], found[-1][1] + rest)
        else:
            found.append((latin, rest))
    return found
