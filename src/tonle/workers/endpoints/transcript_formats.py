"""A transcript as json, text, srt, vtt or verbose_json. Does not: recognize, or stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from tonle.workers.transcript import Segment, Word

TranscriptFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
CONTENT_TYPES: dict[str, str] = {
    "json": "application/json", "verbose_json": "application/json", "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8", "vtt": "text/vtt; charset=utf-8",
}  # fmt: skip


class Transcript(msgspec.Struct):
    task: str
    language: str | None
    seconds: float
    segments: list[Segment]
    warnings: dict[str, str] = {}

    @property
    def text(self) -> str:
        return text_of(self.segments)

    @property
    def usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": round(self.seconds, 3)}


def text_of(segments: Iterable[Segment]) -> str:
    return "".join(segment.text for segment in segments).strip()


def written(transcript: Transcript, form: TranscriptFormat, granularities: set[str]) -> bytes:
    """`granularities`: word, segment; of verbose_json."""
    if form == "text":
        return f"{transcript.text}\n".encode()
    if form == "srt":
        return _subtitles(transcript.segments, ",", numbered=True).encode()
    if form == "vtt":
        return ("WEBVTT\n\n" + _subtitles(transcript.segments, ".", numbered=False)).encode()
    body: dict[str, Any] = {"text": transcript.text, "usage": transcript.usage}
    if form == "verbose_json":
        body = {
            "task": transcript.task,
            "language": transcript.language,
            "duration": round(transcript.seconds, 3),
            **body,
        }
        if "segment" in granularities:
            body["segments"] = [_verbose(number, one) for number, one in enumerate(transcript.segments)]
        if "word" in granularities:
            body["words"] = [_word(word) for segment in transcript.segments for word in segment.words]
    if transcript.warnings:
        body["warnings"] = [{"param": name, "message": why} for name, why in transcript.warnings.items()]
    return msgspec.json.encode(body)


def _verbose(number: int, segment: Segment) -> dict[str, Any]:
    """Numbers that a recognizer does not have are null."""
    return {
        "id": number, "seek": 0, "start": segment.start, "end": segment.end, "text": segment.text, "tokens": segment.tokens,
        "temperature": segment.temperature, "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio, "no_speech_prob": segment.no_speech_prob,
    }  # fmt: skip


def _word(word: Word) -> dict[str, Any]:
    return {"word": word.word, "start": word.start, "end": word.end, "probability": word.probability}


def _subtitles(segments: list[Segment], point: str, *, numbered: bool) -> str:
    out = []
    for number, segment in enumerate(segments, 1):
        head = f"{number}\n" if numbered else ""
        # An arrow in the text would be read as times, an empty line as the end.
        text = " ".join(segment.text.replace("-->", "→").split())
        out.append(f"{head}{_time(segment.start, point)} --> {_time(segment.end, point)}\n{text}\n\n")
    return "".join(out)


def _time(seconds: float, point: str) -> str:
    ms = round(max(0.0, seconds) * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"
