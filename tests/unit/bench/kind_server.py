"""Scripted answers to embeddings, rankings, transcriptions, speech and images."""

from __future__ import annotations

from collections.abc import Callable
from email.message import Message
from email.parser import BytesParser
from typing import Any

from tests.unit.bench.scripted import Asked, Behaviour, Script, Step, frame, json_reply
from tonle.bench.kinds.wav import wav_file, wav_seconds

TOKENS = 7  # of each text, as these servers count
SPEECH_RATE = 24_000
SPEECH_S = 0.5


def kinds(**changes: Any) -> Behaviour:
    """A server that has all kinds. Changes: `paths` that answer in another way, and fields of `Behaviour`."""
    paths: dict[str, Callable[[Asked], Script]] = {
        "/v1/embeddings": embeddings,
        "/v1/rerank": rerank,
        "/v1/audio/transcriptions": transcription,
        "/v1/audio/speech": speech,
        "/v1/images/generations": images,
    }
    return Behaviour(paths=paths | changes.pop("paths", {}), **changes)


def embeddings(asked: Asked) -> Script:
    texts = asked.body["input"]
    data = [{"index": place, "embedding": [0.1, 0.2]} for place in range(len(texts))]
    count = TOKENS * len(texts)
    return [json_reply(200, {"object": "list", "data": data, "usage": {"prompt_tokens": count, "total_tokens": count}})]


def rerank(asked: Asked) -> Script:
    documents = asked.body["documents"]
    results = [{"index": place, "relevance_score": 0.5} for place in range(len(documents))][: asked.body.get("top_n")]
    return [json_reply(200, {"results": results, "usage": {"total_tokens": TOKENS * (1 + len(documents))}})]


def images(asked: Asked) -> Script:
    return [json_reply(200, {"created": 1, "data": [{"b64_json": "AAAA"}] * asked.body["n"]})]


def form_of(asked: Asked) -> dict[str, bytes]:
    """The fields of an upload, read by another implementation than ours."""
    head = f"Content-Type: {asked.headers['content-type']}\r\n\r\n".encode()
    message = BytesParser().parsebytes(head + asked.raw)
    parts: list[Message] = message.get_payload()  # type: ignore[assignment]
    return {
        str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True)  # type: ignore[misc]
        for part in parts
    }


def transcription(asked: Asked) -> Script:
    seconds = wav_seconds(form_of(asked)["file"])
    return [json_reply(200, {"text": f"{seconds:.3f} s"})]


def speech(asked: Asked) -> list[Step]:
    """A WAV file: its header, a pause, then the samples in two pieces."""
    return sound_steps(wav_file(bytes(2 * int(SPEECH_S * SPEECH_RATE)), SPEECH_RATE))


def sound_steps(
    sound: bytes, *, content_type: str = "audio/wav", headers: str = "", pause_s: float = 0.01
) -> list[Step]:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{headers}Transfer-Encoding: chunked\r\n\r\n"
    middle = 44 + (len(sound) - 44) // 2
    return [
        head.encode() + frame(sound[:44]), pause_s, frame(sound[44:middle]), pause_s, frame(sound[middle:]) + b"0\r\n\r\n",
    ]  # fmt: skip
