"""Speech with real workers, asked by the `openai` client as it is: text to sound, and the sound to text again."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.workers.pools import run
from tests.workers.replies import Reply
from tonle.workers.pool import WorkerPool
from tonle.workers.pool_config import PoolConfig
from tonle.workers.transport import WorkersTransport

for package in ("soundfile", "pocketsphinx", "espeakng_loader"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'tonle[speech]'")
openai = pytest.importorskip("openai", reason="the client openai is not installed: pip install openai")

WORDS = "one two three"


class InProcess(httpx.AsyncBaseTransport):
    """HTTP without a socket, in front of pools."""

    def __init__(self, transport: WorkersTransport) -> None:
        self.transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        reply = Reply()
        await self.transport.send(
            request.method,
            request.url.path,
            await request.aread(),
            dict(request.headers),
            reply,
            first_s=60,
            silence_s=60,
        )
        return httpx.Response(reply.status, headers=reply.headers, stream=_Pieces(reply.pieces))


class _Pieces(httpx.AsyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


def test_the_openai_client_speaks_and_listens() -> None:
    run(_speak_and_listen())


async def _speak_and_listen() -> None:
    async with (
        WorkerPool(PoolConfig(kind="tts")) as tts,
        WorkerPool(PoolConfig(kind="asr", options={"max_audio_s": 20})) as asr,
        httpx.AsyncClient(transport=InProcess(WorkersTransport([tts, asr]))) as http,
    ):
        client = openai.AsyncOpenAI(base_url="http://tonle/v1", api_key="x", http_client=http, max_retries=0)
        listed = {model.id: model for model in (await client.models.list()).data}
        assert listed["asr"].facts["languages"] == ["en"] and "km" in listed["tts"].facts["languages"]
        sound = (
            await client.audio.speech.create(model="tts", voice="alloy", input=WORDS, response_format="wav")
        ).content
        await _khmer(client)
        await _listen(client, sound)
        with pytest.raises(openai.BadRequestError, match="cannot translate"):
            await client.audio.translations.create(model="asr", file=("a.wav", sound))
        with pytest.raises(openai.BadRequestError, match="cannot be decoded"):
            await client.audio.transcriptions.create(model="asr", file=("a.wav", b"no sound" * 20))
        with pytest.raises(openai.NotFoundError):
            await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", sound))


async def _khmer(client: Any) -> None:
    async with client.audio.speech.with_streaming_response.create(
        model="tts", voice="nova", input="សួស្តី។ អរគុណ។", response_format="pcm", speed=1.5
    ) as reply:
        pieces = [piece async for piece in reply.iter_bytes()]
    assert reply.headers["content-type"] == "audio/pcm" and len(b"".join(pieces)) > 20_000


async def _listen(client: Any, sound: bytes) -> None:
    file = ("speech.wav", sound, "audio/wav")
    hint = {"vocabulary": WORDS}  # so that no take is misheard
    seconds = (len(sound) - 44) / 48_000
    verbose = await client.audio.transcriptions.create(
        model="asr",
        file=file,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        extra_body=hint,
    )
    assert verbose.text == WORDS and [word.word for word in verbose.words] == WORDS.split()
    assert verbose.duration == pytest.approx(seconds, abs=0.01) and verbose.segments[0].text.strip() == WORDS
    raw = await client.audio.transcriptions.with_raw_response.create(
        model="asr", file=file, response_format="srt", extra_body=hint
    )
    assert raw.text.startswith("1\n00:00:00,") and WORDS in raw.text
    assert float(raw.headers["x-tonle-audio-seconds"]) == pytest.approx(seconds, abs=0.01)
    events = [
        event
        async for event in await client.audio.transcriptions.create(
            model="asr", file=file, stream=True, extra_body=hint
        )
    ]
    assert [event.type for event in events] == ["transcript.text.delta", "transcript.text.done"]
    assert events[0].delta == events[1].text == WORDS


def test_events_of_speech_have_its_length() -> None:
    async def steps() -> None:
        async with WorkerPool(PoolConfig(kind="tts")) as pool:
            reply, body = Reply(), b'{"input": "One. Two.", "response_format": "pcm", "stream_format": "sse"}'
            transport = WorkersTransport([pool])
            await transport.send("POST", "/v1/audio/speech", body, {}, reply, first_s=60, silence_s=60)
            events = [event for piece in reply.pieces for event in piece.decode().split("\n\n") if event]
            assert len(events) == 4 and "speech.audio.done" in events[2] and events[3] == "data: [DONE]"
            audio = base64.b64decode(events[0].split('"audio":"')[1].rstrip('"}'))
            assert len(audio) > 10_000

    asyncio.run(asyncio.wait_for(steps(), 60))
