"""The endpoints of speech with kinds in this process: formats, events, headers, deaths of workers, callers that leave."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from tests.unit.workers.sounds import DirectPool, wav
from tests.workers.replies import Reply
from tonle.errors import InvalidRequest, WorkerDied
from tonle.workers.endpoints.speech import speech
from tonle.workers.endpoints.transcriptions import AUDIO_SECONDS, transcriptions, translations
from tonle.workers.kind import Job, Kind, Result
from tonle.workers.kinds.read_audio import read_audio
from tonle.workers.kinds.tts import Tts
from tonle.workers.pool import WorkerPool
from tonle.workers.worker_request import WorkerRequest


class Scripted(Kind):
    """Hears two segments in any file."""

    batches, streams = False, True

    def load(self, model: str | None, device: str, options: dict[str, Any]) -> None: ...

    def run(self, batch: list[Job]) -> list[Any]:
        raise AssertionError("long files are heard in pieces")

    def stream(self, job: Job) -> Iterator[Result]:
        if job.fields.get("translate"):
            raise InvalidRequest("this model cannot translate", param="model")
        yield Result({"seconds": 2.5, "language": "en"})
        yield Result({"segments": [{"start": 0, "end": 1, "text": " one"}]})
        yield Result({"segments": [{"start": 1, "end": 2, "text": " two"}]})
        yield Result({"end": True})


def ask(
    handler: Any, pool: DirectPool, body: bytes, content_type: str, reply: Reply | None = None, **headers: str
) -> Reply:
    reply = reply or Reply()
    request = WorkerRequest("/", body, {"content-type": content_type, **headers})
    asyncio.run(asyncio.wait_for(handler(request, cast(WorkerPool, pool), reply), 60))
    return reply


def form(**fields: str) -> tuple[bytes, str]:
    parts = [
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()
    ]
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + wav(bytes(100))
    return "".join(parts).encode() + file + b"\r\n--b--", "multipart/form-data; boundary=b"


def events(reply: Reply) -> list[Any]:
    *rest, last, empty = b"".join(reply.pieces).decode().split("\n\n")
    assert last == "data: [DONE]" and empty == ""
    return [json.loads(event.removeprefix("data: ")) for event in rest]


def test_a_transcription_in_each_format() -> None:
    pool = DirectPool(Scripted())
    for kind, content_type in [("json", "application/json"), ("srt", "application/x-subrip"), ("text", "text/plain")]:
        reply = ask(transcriptions, pool, *form(response_format=kind))
        assert reply.status == 200 and reply.headers["content-type"].startswith(content_type)
        assert reply.headers[AUDIO_SECONDS] == "2.500"
    assert b"".join(reply.pieces) == b"one two\n"


def test_a_transcription_is_streamed_in_openais_events() -> None:
    reply = ask(transcriptions, DirectPool(Scripted()), *form(stream="true"))
    assert reply.headers["content-type"].startswith("text/event-stream") and reply.headers[AUDIO_SECONDS] == "2.500"
    assert events(reply) == [
        {"type": "transcript.text.delta", "delta": "one"},
        {"type": "transcript.text.delta", "delta": " two"},
        {"type": "transcript.text.done", "text": "one two", "usage": {"type": "duration", "seconds": 2.5}},
    ]


def test_fields_without_effect_are_told(tts: Tts) -> None:
    heard = ask(transcriptions, DirectPool(Scripted()), *form(chunking_strategy="auto"))
    assert heard.headers["x-tonle-warnings"] == "1; chunking_strategy"
    heard = ask(transcriptions, DirectPool(Scripted()), *form(chunking_strategy="auto", stream="true"))
    assert heard.headers["x-tonle-warnings"] == "1; chunking_strategy"
    body = json.dumps({"input": "hi", "vioce": "nova", "instructions": "whisper"}).encode()
    spoken = ask(speech, DirectPool(tts), body, "application/json")
    assert spoken.status == 200 and spoken.headers["x-tonle-warnings"] == "2; vioce, instructions"
    strict: dict[str, str] = {"x-tonle-strict": "1"}
    with pytest.raises(InvalidRequest, match=r"strict mode.*vioce"):
        ask(speech, DirectPool(tts), body, "application/json", **strict)
    with pytest.raises(InvalidRequest, match=r"strict mode.*chunking_strategy"):
        ask(transcriptions, DirectPool(Scripted()), *form(chunking_strategy="auto"), **strict)


def test_a_worker_that_dies_is_asked_once_more_if_nothing_was_sent() -> None:
    pool = DirectPool(Scripted())
    pool.failures = [WorkerDied("it died")]
    assert ask(transcriptions, pool, *form()).json["text"] == "one two"
    pool.failures = [WorkerDied("it died"), WorkerDied("again")]
    with pytest.raises(WorkerDied, match="again"):
        ask(transcriptions, pool, *form())
    pool.failures = [WorkerDied("it died")]
    with pytest.raises(WorkerDied):
        ask(transcriptions, pool, *form(stream="true"))
    assert pool.num_closed == 5


def test_errors_come_before_the_head() -> None:
    pool, reply = DirectPool(Scripted()), Reply()
    for handler, body, content_type in [
        (translations, *form()),
        (transcriptions, b"{}", "application/json"),
        (speech, b'{"input": 5}', "application/json"),
    ]:
        with pytest.raises(InvalidRequest):
            ask(handler, pool, body, content_type, reply)
    assert reply.status == 0


def say(tts: Tts, reply: Reply | None = None, **fields: Any) -> Reply:
    return ask(
        speech, DirectPool(tts), json.dumps({"input": "One. Two.", **fields}).encode(), "application/json", reply
    )


@pytest.mark.parametrize(
    ("kind", "content_type"),
    [(None, "audio/mpeg"), ("opus", "audio/ogg"), ("flac", "audio/flac"), ("wav", "audio/wav"), ("pcm", "audio/pcm")],
)
def test_speech_in_each_format(tts: Tts, kind: str | None, content_type: str) -> None:
    reply = say(tts, response_format=kind, voice={"id": "nova"})
    assert reply.headers["content-type"] == content_type
    assert (len(reply.pieces) == 2) == (kind != "flac")
    data = b"".join(reply.pieces)
    made = len(data) / 48_000 if kind == "pcm" else len(read_audio(memoryview(data))) / 16_000
    assert 0.8 < made < 3


def test_how_long_it_is_stands_in_the_header_if_it_is_known(tts: Tts) -> None:
    one = say(tts, input="One", response_format="pcm")
    assert float(one.headers[AUDIO_SECONDS]) == pytest.approx(len(one.pieces[0]) / 48_000, abs=0.001)
    assert AUDIO_SECONDS not in say(tts, response_format="pcm").headers


def test_speech_in_events(tts: Tts) -> None:
    plain = b"".join(say(tts, response_format="pcm").pieces)
    *deltas, done = events(say(tts, response_format="pcm", stream_format="sse"))
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    # eSpeak NG draws a little noise: no two are the same to the bit.
    assert len(b"".join(base64.b64decode(delta["audio"]) for delta in deltas)) == len(plain)
    assert done["type"] == "speech.audio.done" and done["usage"]["input_characters"] == 9
    assert done["usage"]["seconds"] == pytest.approx(len(plain) / 48_000, abs=0.001)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"response_format": "aac"}, "response_format"), ({"voice": ""}, "voice"), ({"voice": "v" * 101}, "voice"),
     ({"speed": 9}, "speed"), ({"input": ""}, "input"), ({"response_format": "ogg"}, "response_format"),
     ({"stream_format": "x"}, "stream_format")],
)  # fmt: skip
def test_speech_that_cannot_be_made_is_refused(tts: Tts, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        say(tts, **fields)
    assert error.value.param == param


def test_a_slow_caller_is_waited_for(tts: Tts) -> None:
    slow = Reply()
    slow.is_slow = True

    async def main() -> None:
        request = WorkerRequest("/", b'{"input": "One. Two. Three.", "response_format": "pcm"}', {})
        speaking = asyncio.create_task(speech(request, cast(WorkerPool, DirectPool(tts)), slow))
        while not slow.pieces:  # noqa: ASYNC110 - a fake tells nobody
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # in which more would come
        assert not speaking.done()
        speaking.cancel()

    asyncio.run(asyncio.wait_for(main(), 120))
    assert len(slow.pieces) == 1
