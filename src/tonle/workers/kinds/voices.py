"""Names of voices: OpenAI's, which any synthesizer takes, and checks that those with a few voices share."""

from __future__ import annotations

from collections.abc import Sequence

from tonle.errors import InvalidRequest

# OpenAI's names, each with a variant of eSpeak NG that is its own. Synthesizers with voices of their own take them, too.
OPENAI_VOICES = {
    "alloy": "klatt4", "ash": "m2", "ballad": "m4", "cedar": "m6", "coral": "f3", "echo": "m1", "fable": "m3", "marin": "f1",
    "nova": "f2", "onyx": "m7", "sage": "f5", "shimmer": "f4", "verse": "m5",
}  # fmt: skip


def check_voice(voice: str, names: Sequence[str]) -> None:
    """Raises `InvalidRequest`."""
    if voice not in names and voice not in OPENAI_VOICES:
        raise InvalidRequest(f"there is no voice {voice[:60]!r}; this model has {', '.join(names[:40])}", param="voice")


def check_language(asked: str | None, spoken: str) -> None:
    """`spoken`: the only one. Raises `InvalidRequest`."""
    if asked is not None and asked.partition("-")[0].lower() != spoken.partition("-")[0].lower():
        raise InvalidRequest(f"this voice speaks {spoken} only", param="language")
