"""What is read of answers that are no chats: how many items came, how long the sound is, the tokens that the server counted.

Does: check that an answer is what was asked for. Does not: read the clock or touch sockets; keep vectors, sound or images.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tonle.bench.kinds.wav import SoundMeter
from tonle.bench.measure import TokenSource
from tonle.protocol.answers import Answer

AUDIO_SECONDS = "x-tonle-audio-seconds"
PCM_RATE, PCM_BYTES = 24_000, 2  # of OpenAI's format "pcm": mono


class _Body(msgspec.Struct):
    """The fields that are looked at, of all kinds together. What an item holds is skipped, not built."""

    data: list[msgspec.Raw] | None = None  # of embeddings and images
    results: list[msgspec.Raw] | None = None  # of a ranking
    text: str | None = None  # of a transcription
    usage: Any = None
    meta: Any = None  # of Cohere's rankings


class KindAnswer:
    """Owns what one answer said. A whole reply, unless a kind says otherwise."""

    def __init__(self) -> None:
        self.arrivals_s: list[float] = []  # of the first byte of sound
        self.last_s: float | None = None
        self.items: int | None = None
        self.audio_s: float | None = None
        self.prompt_tokens: int | None = None
        self.failure: str | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.done = False  # no answer ends by a mark in it

    @property
    def complete(self) -> bool:
        return self.last_s is not None

    def feed(self, data: bytes, now_s: float) -> None:
        """Bytes of an answer that is read as it arrives."""

    def finish(self, now_s: float, headers: Mapping[str, str]) -> None:
        """No more of them come."""
        self.last_s = now_s

    def take_whole(self, body: bytes, content_type: str, now_s: float) -> None:
        self.last_s = now_s
        try:
            found = msgspec.json.decode(body, type=_Body)
        except (msgspec.MsgspecError, RecursionError) as error:
            self.failure = f"unreadable answer: {error}"
            return
        self.prompt_tokens = _tokens(found.usage, found.meta)
        self._take(found)

    def _take(self, body: _Body) -> None:
        """Look at what came."""

    def _expect(self, came: int, wanted: int, what: str) -> None:
        self.items = came
        if came != wanted:
            self.failure = f"wrong number of {what}: {came} instead of {wanted}"

    def count_output(self) -> tuple[int, TokenSource]:
        return 0, "usage"

    def collected(self) -> Answer | None:
        return None


class ItemsAnswer(KindAnswer):
    """Embeddings or images: an entry of `data` for each."""

    def __init__(self, wanted: int, what: str) -> None:
        super().__init__()
        self._wanted = wanted
        self._what = what

    def _take(self, body: _Body) -> None:
        self._expect(len(body.data or ()), self._wanted, self._what)


class RankingAnswer(KindAnswer):
    """All documents count as ranked, though `top_n` may leave results out."""

    def __init__(self, documents: int, results: int) -> None:
        super().__init__()
        self._documents = documents
        self._results = results

    def _take(self, body: _Body) -> None:
        self._expect(len(body.results or ()), self._results, "results")
        self.items = self._documents


class TranscriptAnswer(KindAnswer):
    def __init__(self, audio_s: float) -> None:
        super().__init__()
        self._audio_s = audio_s

    def take_whole(self, body: bytes, content_type: str, now_s: float) -> None:
        """Formats other than JSON (`text`, `srt`, `vtt`) are taken as they are."""
        self.audio_s = self._audio_s
        if "json" in content_type or body[:1] == b"{":
            super().take_whole(body, content_type, now_s)
        else:
            self.last_s = now_s

    def _take(self, body: _Body) -> None:
        self.prompt_tokens = None  # of sound: no two servers count alike
        if body.text is None:
            self.failure = "unreadable answer: no text in it"


class SpeechAnswer(KindAnswer):
    """Sound, read as it arrives. A WAV header is not sound yet."""

    def __init__(self, *, is_pcm: bool) -> None:
        super().__init__()
        self._is_pcm = is_pcm
        self._sound = SoundMeter(PCM_RATE * PCM_BYTES if is_pcm else None)

    def feed(self, data: bytes, now_s: float) -> None:
        self._sound.feed(data)
        if not self.arrivals_s and self._sound.num_bytes:
            self.arrivals_s.append(now_s)

    def finish(self, now_s: float, headers: Mapping[str, str]) -> None:
        self.last_s = now_s
        self._sound.finish()
        kind = headers.get("content-type", "").lower()
        if kind.startswith(("application/json", "text/")):
            self.failure = f"unreadable answer: {kind} instead of sound"
        elif not self._sound.num_bytes:
            self.failure = "empty answer: no sound in it"
        elif not self.arrivals_s:
            self.arrivals_s.append(now_s)
        self.audio_s = _said(headers)
        if self.audio_s is None and self._sound.seconds is not None:
            self.audio_s = self._sound.seconds / (_pcm_factor(kind) if self._is_pcm else 1.0)


def _said(headers: Mapping[str, str]) -> float | None:
    """The length that the server gives."""
    try:
        seconds = float(headers.get(AUDIO_SECONDS, ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def _pcm_factor(content_type: str) -> float:
    """How many times more bytes a second has than OpenAI's, of `audio/L16; rate=48000; channels=2`."""
    rate, channels = (re.search(rf"{name}=(\d+)", content_type) for name in ("rate", "channels"))
    factor = (int(rate[1]) / PCM_RATE if rate else 1.0) * (int(channels[1]) if channels else 1)
    return factor or 1.0


def _tokens(usage: Any, meta: Any) -> int | None:
    """Of the inputs: as OpenAI and vLLM say it, or as Cohere does."""
    for counts, name in ((usage, "prompt_tokens"), (usage, "total_tokens"), (_of(meta, "tokens"), "input_tokens")):
        found = _of(counts, name)
        if isinstance(found, int):
            return found
    return None


def _of(table: Any, name: str) -> Any:
    return table.get(name) if isinstance(table, dict) else None
