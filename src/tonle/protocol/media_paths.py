"""Paths whose requests or answers are media: sound, pictures, and what workers of one's own take.

Does: name them, and say which pool answers each. Does not: route.
"""

from __future__ import annotations

TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
SPEECH = "/v1/audio/speech"
IMAGES = "/v1/images/generations"
WORKERS = "/v1/workers/"  # and the name of a worker pool

FORM_PATHS = (TRANSCRIPTIONS, TRANSLATIONS)  # they take multipart/form-data, the others JSON
MEDIA_PATHS = (*FORM_PATHS, SPEECH, IMAGES)

# The kind of worker pool that answers each.
KIND_OF = {TRANSCRIPTIONS: "asr", TRANSLATIONS: "asr", SPEECH: "tts", IMAGES: "images"}

POOL_HEADER = "x-tonle-pool"  # of a reply: the worker pool that answered
AUDIO_SECONDS_HEADER = "x-tonle-audio-seconds"  # of a reply: the length of the sound that was read or made


def is_media(path: str) -> bool:
    return path in MEDIA_PATHS or path.startswith(WORKERS)
