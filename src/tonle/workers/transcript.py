"""What recognizers and the endpoint of transcriptions hand each other: words, segments, and what is asked for.

Does: name the fields, as OpenAI's verbose_json has them. Does not: recognize or write subtitles.
"""

from __future__ import annotations

import msgspec


class Word(msgspec.Struct, frozen=True):
    word: str
    start: float  # seconds from the start of the file
    end: float
    probability: float | None = None  # how sure the recognizer is, 0 to 1


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """An utterance."""

    start: float
    end: float
    text: str
    words: list[Word] = []  # empty unless they were asked for
    tokens: list[int] = []
    temperature: float = 0.0
    avg_logprob: float | None = None
    compression_ratio: float | None = None
    no_speech_prob: float | None = None


class AsrOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """`Job.fields` of the kind asr; the file is `Job.media[0]`."""

    translate: bool = False  # to English
    language: str | None = None  # ISO 639-1; None: the recognizer finds out
    prompt: str | None = None
    temperature: float | None = None
    words: bool = False  # times of words are wanted
    vocabulary: list[str] | None = None  # the only words to be heard


class AsrPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """`Result.fields`. Streamed: first the seconds, then one segment at a time, then `end`. Else all in one."""

    seconds: float | None = None  # of the file
    language: str | None = None  # as it was given or found
    segments: list[Segment] = []
    end: bool = False
    warnings: dict[str, str] = {}  # fields of the request that had no effect, and why
