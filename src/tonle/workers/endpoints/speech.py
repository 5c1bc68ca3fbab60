"""POST /v1/audio/speech: text in JSON, spoken sound back, sentence by sentence as it is made.

Does: read the request, have a worker speak, pass its bytes on, as they are or in OpenAI's events. Does not: synthesize or encode
(the worker does).
"""

from __future__ import annotations

import base64
import contextlib
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Struct

from tonle.edge.client_connection import Sink
from tonle.errors import InvalidRequest
from tonle.protocol import sse
from tonle.protocol.field_types import about
from tonle.protocol.fields import OtherFields
from tonle.protocol.parse import parse, strict_refusal, warning_headers
from tonle.workers.endpoints.transcriptions import AUDIO_SECONDS
from tonle.workers.kind import Job
from tonle.workers.pace import Pace
from tonle.workers.pool import WorkerPool
from tonle.workers.speech_order import AudioFormat, TtsOrder, TtsPiece
from tonle.workers.worker_request import WorkerRequest

CONTENT_TYPES: dict[AudioFormat, str] = {
    "mp3": "audio/mpeg", "opus": "audio/ogg", "flac": "audio/flac", "wav": "audio/wav", "pcm": "audio/pcm",
}  # fmt: skip
MAX_VOICE_CHARS = 100


class Voice(Struct):
    id: str


class SpeechRequest(Struct, kw_only=True):
    other_fields: ClassVar = OtherFields(
        refused={}, no_effect={"instructions": "has no effect: voices speak as they do; voice and speed change that"}
    )
    input: Annotated[str, about("The text to speak; up to 4,096 characters, or what the server allows.")]
    model: Annotated[str | None, about("Name of the voice model; may be left out.")] = None
    voice: Annotated[
        str | Voice | None, about("alloy, nova and others, or a voice of the model. Default its first.")
    ] = None
    response_format: Annotated[
        Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None, about("Default mp3. All but aac; 24 kHz, mono.")
    ] = None
    speed: Annotated[float | None, about("0.25 to 4. Default 1.")] = None
    stream_format: Annotated[Literal["audio", "sse"] | None, about("sse: events with base64. Default audio.")] = None
    language: Annotated[str | None, about("Not OpenAI's. Default that of the voice, or of the letters.")] = None


async def speech(request: WorkerRequest, pool: WorkerPool, sink: Sink) -> None:
    asked, warnings = parse(request.body, SpeechRequest)
    if warnings and request.is_strict:
        raise strict_refusal(warnings)
    order = _order(asked)
    job = Job(msgspec.to_builtins(order))
    events = asked.stream_format == "sse"
    content_type = sse.CONTENT_TYPE if events else CONTENT_TYPES[order.format]
    headers = {"content-type": content_type, **warning_headers(warnings)}
    pace, began, seconds = Pace(sink), False, 0.0
    async with contextlib.aclosing(pool.stream(job)) as results:
        async for result in results:
            piece = msgspec.convert(result.fields, TtsPiece)
            seconds = piece.seconds
            if not began:
                # Known beforehand only if this is all; else the last event has it.
                sink.head(200, headers | ({AUDIO_SECONDS: f"{seconds:.3f}"} if piece.end else {}))
                began = True
            await pace.room()
            data = bytes(result.media[0])
            if data:
                sink.data(
                    _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()}) if events else data
                )
    if events:
        # Tokens are none; what is counted is seconds and characters.
        usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0, "seconds": round(seconds, 3)}
        usage["input_characters"] = len(asked.input)
        sink.data(_event({"type": "speech.audio.done", "usage": usage}) + sse.DONE)


def _order(asked: SpeechRequest) -> TtsOrder:
    """Raises `InvalidRequest`. What depends on the model, the worker checks."""
    if asked.response_format == "aac":
        raise InvalidRequest("aac cannot be made; use mp3, opus, flac, wav or pcm", param="response_format")
    voice = asked.voice.id if isinstance(asked.voice, Voice) else asked.voice
    if voice is not None and not 0 < len(voice) <= MAX_VOICE_CHARS:
        raise InvalidRequest(f"voice must have 1 to {MAX_VOICE_CHARS} characters", param="voice")
    return TtsOrder(
        text=asked.input,
        voice=voice or "alloy",
        speed=1.0 if asked.speed is None else asked.speed,
        language=asked.language or None,
        format=asked.response_format or "mp3",
    )


def _event(body: dict[str, Any]) -> bytes:
    return sse.DATA + msgspec.json.encode(body) + sse.END
