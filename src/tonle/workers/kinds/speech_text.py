"""Text to be spoken, in pieces: sentences for streaming, and runs of one script, each with its language.

Does: cut (where `workers/sentences.py` says), tell languages by their letters. Does not: synthesize.
"""

from __future__ import annotations

import re

from tonle.workers.sentences import sentences_of

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
    """None of them is empty, or longer than `MAX_CHARS`. Together they are the text, but for spaces."""
    return [piece for sentence in sentences_of(text) if (piece := sentence.strip())]


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
