"""`MediaUse`: seconds of sound and pictures of a request, which keys may have limits of, beside tokens.

Does: estimate them when a request comes, read them from its reply. Does not: charge (`limits/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tonle.protocol.answers import Answer
from tonle.protocol.media_paths import AUDIO_SECONDS_HEADER, FORM_PATHS, IMAGES, SPEECH

BYTES_PER_S = 16_000  # of an upload: 128 kbit/s, between a compressed recording and plain samples
CHARS_PER_S = 15  # of a text that is read aloud
MAX_AUDIO_S = 1e6  # that a server may say it was
MAX_IMAGES = 10_000  # that a caller may ask for, or a server may say it made


class MediaUse(msgspec.Struct, frozen=True):
    audio_s: float = 0.0
    images: int = 0
    characters: int = 0  # to be spoken: counted, and never limited

    def __bool__(self) -> bool:
        return bool(self.audio_s or self.images)


NO_MEDIA = MediaUse()


def estimate_media(path: str, body: Mapping[str, Any], *, num_file_bytes: int = 0) -> MediaUse:
    """Before anything is computed. `num_file_bytes`: of the files in a form."""
    if path in FORM_PATHS:
        return MediaUse(audio_s=num_file_bytes / BYTES_PER_S)
    if path == SPEECH:
        text = body.get("input")
        num_chars = len(text) if isinstance(text, str) else 0
        return MediaUse(audio_s=num_chars / CHARS_PER_S, characters=num_chars)
    if path == IMAGES:
        asked = body.get("n")
        return MediaUse(images=min(max(1, asked), MAX_IMAGES) if isinstance(asked, int) else 1)
    return NO_MEDIA


def used_media(estimated: MediaUse, headers: Mapping[str, str], answer: Answer) -> MediaUse:
    """Of a reply with status 200; the estimate where its server does not tell."""
    if estimated.images:
        made = answer.raw.get("data") if isinstance(answer.raw, dict) else None
        return MediaUse(images=min(len(made), MAX_IMAGES)) if isinstance(made, list) else estimated
    if not estimated.audio_s:
        return estimated
    told = _seconds(headers.get(AUDIO_SECONDS_HEADER))
    if told is None and answer.usage is not None:
        told = _seconds(answer.usage.get("seconds"))  # OpenAI's: {"type": "duration", "seconds": 7}
    return estimated if told is None else MediaUse(audio_s=told, characters=estimated.characters)


def _seconds(value: object) -> float | None:
    """A server may say anything."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds <= MAX_AUDIO_S else None
