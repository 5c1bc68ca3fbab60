"""What the endpoint of speech and synthesizers hand each other. Does not: synthesize or encode."""

from __future__ import annotations

from typing import Literal

import msgspec

AudioFormat = Literal["mp3", "opus", "flac", "wav", "pcm"]


class TtsOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """`Job.fields` of the kind tts."""

    text: str
    voice: str = "alloy"
    speed: float = 1.0
    language: str | None = None  # ISO 639-1; None: the voice's, or that of the script
    format: AudioFormat = "mp3"


class TtsPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """`Result.fields`; the bytes of the file are `Result.media[0]`. Streamed: one for each sentence."""

    seconds: float  # of sound, up to and with this piece
    end: bool = False  # the last
