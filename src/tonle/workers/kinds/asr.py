"""`Asr`: speech to text. A folder of Whisper weights with faster-whisper; without a model, English with PocketSphinx.

Does: decode the caller's file, choose the recognizer, hand on segments as they are found. Does not: recognize
(`asr_whisper.py`, `asr_pocketsphinx.py`), or write answers (`endpoints/transcriptions.py`).

Options: max_audio_s (seconds of one file, default 3600), compute_type and beam_size (Whisper).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np

from tonle.errors import ConfigError, TonleError
from tonle.workers.kind import Job, Kind, Result
from tonle.workers.kinds.read_audio import MAX_AUDIO_S, SAMPLE_RATE, Pcm, read_audio
from tonle.workers.transcript import AsrOrder, AsrPiece, Segment

_OPTIONS = {"max_audio_s", "compute_type", "beam_size"}


class Recognizer(Protocol):
    facts: dict[str, Any]

    def begin(self, order: AsrOrder, pcm: Pcm) -> tuple[str | None, dict[str, str]]:
        """Check the order. The language, and which fields have no effect. Raises `InvalidRequest`."""
        ...

    def segments(self, order: AsrOrder, pcm: Pcm) -> Iterator[Segment]:
        """As they are found."""
        ...


class Asr(Kind):
    batches: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def load(self, model: str | None, device: str, options: dict[str, Any]) -> None:
        if unknown := sorted(options.keys() - _OPTIONS):
            raise ConfigError(f"asr has no option {unknown[0]}; it has {', '.join(sorted(_OPTIONS))}", param="options")
        self._max_s = options.get("max_audio_s", MAX_AUDIO_S)
        if not isinstance(self._max_s, int | float) or not 0 < self._max_s <= 86_400:
            raise ConfigError("max_audio_s must be a number of seconds, at most 86400", param="options")
        self._recognizer: Recognizer
        if model is None:
            from tonle.workers.kinds.asr_pocketsphinx import PocketSphinx

            self._recognizer = PocketSphinx()
        else:
            from tonle.workers.kinds.asr_whisper import Whisper

            self._recognizer = Whisper(model, device, options)

    def describe(self) -> dict[str, Any]:
        return {**self._recognizer.facts, "sample_rate": SAMPLE_RATE, "max_audio_s": self._max_s}

    def warm_up(self) -> list[Job]:
        hum = (np.sin(np.arange(SAMPLE_RATE // 2) / 20) * 8000).astype("<i2")
        header = (
            b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data\xff\xff\xff\xff"
        )
        return [Job(msgspec.to_builtins(AsrOrder()), (header + hum.tobytes(),))]

    def run(self, batch: list[Job]) -> list[Result | TonleError]:
        return [self._whole(job) for job in batch]

    def stream(self, job: Job) -> Iterator[Result]:
        for piece in self._pieces(job):
            yield Result(msgspec.to_builtins(piece))

    def _whole(self, job: Job) -> Result | TonleError:
        try:
            first, *rest = self._pieces(job)
        except TonleError as error:
            return error
        segments = [segment for piece in rest for segment in piece.segments]
        return Result(msgspec.to_builtins(msgspec.structs.replace(first, segments=segments, end=True)))

    def _pieces(self, job: Job) -> Iterator[AsrPiece]:
        order = msgspec.convert(job.fields, AsrOrder)
        pcm = read_audio(memoryview(job.media[0]), max_s=self._max_s)
        language, warnings = self._recognizer.begin(order, pcm)
        yield AsrPiece(seconds=len(pcm) / SAMPLE_RATE, language=language, warnings=warnings)
        for segment in self._recognizer.segments(order, pcm):
            yield AsrPiece(segments=[segment])
        yield AsrPiece(end=True)
