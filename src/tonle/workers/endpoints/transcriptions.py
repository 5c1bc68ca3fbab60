"""POST /v1/audio/transcriptions and /v1/audio/translations: a form with a file of speech, its text back.

Does: read the form, have a worker recognize, write the reply in the format asked for, whole or as OpenAI's events. Does not:
decode sound (the worker does, `kinds/read_audio.py`).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import AsyncIterator
from typing import Any, get_args

import msgspec

from tonle.edge.client_connection import Sink
from tonle.errors import InvalidRequest, WorkerDied
from tonle.protocol import sse
from tonle.protocol.multipart import Form, parse_form
from tonle.protocol.openai import FieldWarning
from tonle.protocol.parse import strict_refusal, warning_headers
from tonle.workers.endpoints.transcript_formats import CONTENT_TYPES, Transcript, TranscriptFormat, text_of, written
from tonle.workers.kind import Job
from tonle.workers.pace import Pace
from tonle.workers.pool import WorkerPool
from tonle.workers.transcript import AsrOrder, AsrPiece
from tonle.workers.worker_request import WorkerRequest

AUDIO_SECONDS = "x-tonle-audio-seconds"  # of a reply: what is charged and recorded
MAX_ATTEMPTS = 2  # while nothing was sent
MAX_WARNINGS = 32

_GRANULARITIES = "timestamp_granularities[]"
_READ = {
    "file",
    "model",
    "language",
    "prompt",
    "response_format",
    "temperature",
    "stream",
    "vocabulary",
    _GRANULARITIES,
}
_REFUSED = {"known_speaker_names[]", "known_speaker_references[]"}


class Asked(msgspec.Struct):
    """A form, read."""

    order: AsrOrder
    file: memoryview
    form: TranscriptFormat
    granularities: set[str]
    stream: bool
    warnings: dict[str, str]


async def transcriptions(request: WorkerRequest, pool: WorkerPool, sink: Sink) -> None:
    await _answer(request, pool, sink, translate=False)


async def translations(request: WorkerRequest, pool: WorkerPool, sink: Sink) -> None:
    """To English."""
    await _answer(request, pool, sink, translate=True)


async def _answer(request: WorkerRequest, pool: WorkerPool, sink: Sink, *, translate: bool) -> None:
    asked = read_form(parse_form(request.body, request.header("content-type")), translate=translate)
    if asked.warnings and request.is_strict:
        raise strict_refusal(_field_warnings(asked.warnings))
    job = Job(msgspec.to_builtins(asked.order), (asked.file,))
    if asked.stream:
        await _stream(asked, job, pool, sink)
        return
    transcript = await _transcript(asked, job, pool)
    headers = {"content-type": CONTENT_TYPES[asked.form], AUDIO_SECONDS: f"{transcript.seconds:.3f}"}
    sink.head(200, headers | warning_headers(_field_warnings(transcript.warnings)))
    sink.data(written(transcript, asked.form, asked.granularities))


async def _transcript(asked: Asked, job: Job, pool: WorkerPool) -> Transcript:
    """In pieces from the worker, too: a long file takes longer than a worker may be silent."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        found = Transcript("translate" if asked.order.translate else "transcribe", None, 0.0, [], dict(asked.warnings))
        try:
            async for piece in _pieces(job, pool):
                found.segments += piece.segments
                found.warnings |= piece.warnings
                found.language = piece.language or found.language
                found.seconds = piece.seconds or found.seconds
        except WorkerDied:
            if attempt == MAX_ATTEMPTS:
                raise
        else:
            break
    return found


async def _stream(asked: Asked, job: Job, pool: WorkerPool, sink: Sink) -> None:
    pace = Pace(sink)
    found = Transcript("", None, 0.0, [])
    async for piece in _pieces(job, pool):
        if piece.seconds is not None:
            found.seconds = piece.seconds
            headers = {"content-type": sse.CONTENT_TYPE, AUDIO_SECONDS: f"{piece.seconds:.3f}"}
            sink.head(200, headers | warning_headers(_field_warnings(asked.warnings | piece.warnings)))
        for segment in piece.segments:
            delta = segment.text if found.segments else segment.text.lstrip()
            found.segments.append(segment)
            await pace.room()
            sink.data(_event({"type": "transcript.text.delta", "delta": delta}))
    done = {"type": "transcript.text.done", "text": text_of(found.segments), "usage": found.usage}
    sink.data(_event(done) + sse.DONE)


async def _pieces(job: Job, pool: WorkerPool) -> AsyncIterator[AsrPiece]:
    async with contextlib.aclosing(pool.stream(job)) as results:
        async for result in results:
            yield msgspec.convert(result.fields, AsrPiece)


def _field_warnings(warnings: dict[str, str]) -> list[FieldWarning]:
    return [FieldWarning(name, why) for name, why in warnings.items()]


def _event(body: dict[str, Any]) -> bytes:
    return sse.DATA + msgspec.json.encode(body) + sse.END


# -- the form


def read_form(form: Form, *, translate: bool) -> Asked:
    """Raises `InvalidRequest`."""
    if (file := form.file("file")) is None:
        raise InvalidRequest("file is missing: send the sound as a part with a filename", param="file")
    names = {part.name for part in form.parts}
    if refused := sorted(names & _REFUSED):
        raise InvalidRequest(f"{refused[0]} cannot be served: speakers are not told apart", param=refused[0])
    unknown = sorted(names - _READ)[:MAX_WARNINGS]
    response_format = _text(form, "response_format") or "json"
    if response_format not in get_args(TranscriptFormat):
        raise InvalidRequest(
            f"response_format must be one of {', '.join(get_args(TranscriptFormat))}", param="response_format"
        )
    granularities = {*form.texts(_GRANULARITIES)}
    if not granularities <= {"word", "segment"}:
        raise InvalidRequest(f"{_GRANULARITIES} must be word or segment", param=_GRANULARITIES)
    if granularities and response_format != "verbose_json":
        raise InvalidRequest(f"{_GRANULARITIES} needs response_format verbose_json", param=_GRANULARITIES)
    stream = _boolean(form, "stream")
    if stream and response_format not in ("json", "text"):
        raise InvalidRequest(f"response_format {response_format} cannot be streamed; use json", param="stream")
    language = _text(form, "language")
    if translate and language is not None:  # as in OpenAI's API: the language of the file is found out
        unknown.append("language")
    order = AsrOrder(
        translate=translate,
        language=None if translate else language,
        prompt=_text(form, "prompt"),
        temperature=_temperature(form),
        words="word" in granularities,
        vocabulary=None
        if (words := _text(form, "vocabulary")) is None
        else re.split(r"[\s,]+", words.strip(" ,\r\n\t")),
    )
    warnings = {name[:100]: "has no effect" for name in unknown}
    return Asked(order, file.data, response_format, granularities or {"segment"}, stream, warnings)  # type: ignore[arg-type]


def _text(form: Form, name: str) -> str | None:
    """None if it is left out or empty."""
    return form.text(name) or None


def _boolean(form: Form, name: str) -> bool:
    words = {"": False, "false": False, "0": False, "true": True, "1": True}
    if (word := (form.text(name) or "").strip().lower()) not in words:
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return words[word]


def _temperature(form: Form) -> float | None:
    if (text := _text(form, "temperature")) is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise InvalidRequest("temperature must be a number from 0 to 1", param="temperature")
    return value
