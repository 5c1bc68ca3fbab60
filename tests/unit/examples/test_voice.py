"""examples/voice.py against a scripted server: order, overlap, interruption, errors, and the file that it writes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import struct
import sys
import wave
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from examples import voice

from tests.fakes.voice_server import QUESTION, RATE, SAMPLES, SENTENCES, VoiceServer, voice_server, wav_head

PROGRAM = Path(__file__).parents[3] / "examples/voice.py"
CHAT, SPEECH, TRANSCRIPTION = "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions"
SOUND = wav_head(4) + b"\1\0\2\0"


class Pipeline:
    """A scripted server, the program's parts pointed at it, and what they wrote."""

    def __init__(self, server: VoiceServer, client: httpx.AsyncClient) -> None:
        self.server = server
        self.client = client
        self.file = io.BytesIO()
        self.out = voice.WavWriter(self.file)
        self.timeline = voice.Timeline()

    def start(self) -> asyncio.Task[str]:
        program = voice.Voice(self.client, voice.Models("ears", "llm", "mouth"), voice="low")
        return asyncio.create_task(program.answer(SOUND, self.out, self.timeline))

    def spoken(self) -> list[int]:
        """Which sentences, by the samples in the file."""
        samples = struct.unpack(f"<{self.out.num_bytes // 2}h", self.file.getvalue()[44:])
        return list(dict.fromkeys(samples))


@contextlib.asynccontextmanager
async def piped() -> AsyncIterator[Pipeline]:
    async with voice_server() as server, httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        async with asyncio.timeout(120):
            yield Pipeline(server, client)


def test_sentences_are_spoken_in_order_under_one_session() -> None:
    async def main() -> None:
        async with piped() as pipeline:
            assert await pipeline.start() == " ".join(SENTENCES)
            server = pipeline.server
            assert [asked.json["input"] for asked in server.of(SPEECH)] == SENTENCES
            assert pipeline.spoken() == [1, 2, 3]
            assert {asked.json["voice"] for asked in server.of(SPEECH)} == {"low"}
            assert server.of(CHAT)[0].json["messages"][-1] == {"role": "user", "content": QUESTION}
            assert b'name="model"\r\n\r\nears' in server.of(TRANSCRIPTION)[0].body
            assert SOUND in server.of(TRANSCRIPTION)[0].body
            sessions = {asked.headers["x-session-id"] for asked in server.asked}
            assert len(server.asked) == 5 and len(sessions) == 1 and sessions != {""}

    asyncio.run(main())


def test_the_first_sentence_is_spoken_while_the_model_still_writes() -> None:
    async def main() -> None:
        async with piped() as pipeline:
            pipeline.server.text.clear()
            answer = pipeline.start()
            await pipeline.server.until(SPEECH, state="done")  # its sound is there, the text is not
            assert pipeline.server.of(CHAT)[0].state == "open"
            pipeline.server.text.set()
            await answer
            wanted = ["transcribed", "first token", "first sentence", "first audio", "text complete", "speech complete"]
            assert list(pipeline.timeline.marks) == wanted

    asyncio.run(main())


def test_every_leg_has_its_times_and_its_request() -> None:
    async def main() -> None:
        async with piped() as pipeline:
            await pipeline.start()
            legs = pipeline.timeline.legs
            assert [leg.name for leg in legs] == ["transcription", "language model", *["speech"] * 3]
            for leg in legs:
                assert leg.ended_s is not None and leg.began_s <= (leg.first_s or leg.began_s) <= leg.ended_s
                assert leg.request_id == "req-1"
            assert all(leg.first_s is not None for leg in legs[1:])
            assert sum("req-1" in line for line in pipeline.timeline.lines()) == 5

    asyncio.run(main())


async def stop_while_speaking(pipeline: Pipeline, answer: asyncio.Task[str]) -> None:
    await pipeline.server.until(SPEECH)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer


async def fail_while_speaking(pipeline: Pipeline, answer: asyncio.Task[str]) -> None:
    """The speech breaks off: the model is stopped, too."""
    with pytest.raises(voice.VoiceError, match="out of order"):
        await answer


@pytest.mark.parametrize("end", [stop_while_speaking, fail_while_speaking])
def test_an_end_cancels_the_open_legs(end: Callable[[Pipeline, asyncio.Task[str]], Awaitable[None]]) -> None:
    async def main() -> None:
        async with piped() as pipeline:
            server = pipeline.server
            server.text.clear()
            server.speech.clear()
            if end is fail_while_speaking:
                server.failing[SPEECH] = 503
            await end(pipeline, pipeline.start())
            await server.until(CHAT, state="hung up")
            if end is stop_while_speaking:
                await server.until(SPEECH, state="hung up")
            assert len(server.asked) == 3  # nothing is asked for afterwards

    asyncio.run(main())


@pytest.mark.parametrize("path", [TRANSCRIPTION, CHAT, SPEECH])
def test_the_words_of_a_refusal_are_shown(path: str) -> None:
    async def main() -> None:
        async with piped() as pipeline:
            pipeline.server.failing[path] = 503
            with pytest.raises(voice.VoiceError, match=f"{path}: out of order"):
                await pipeline.start()

    asyncio.run(main())


def test_silence_is_not_answered() -> None:
    async def main() -> None:
        async with piped() as pipeline:
            pipeline.server.question = ""
            with pytest.raises(voice.VoiceError, match="nothing was said"):
                await pipeline.start()
            assert pipeline.server.of(CHAT) == []

    asyncio.run(main())


def test_models_are_found_by_their_kinds() -> None:
    async def main() -> None:
        async with piped() as pipeline:
            assert await voice.find_models(pipeline.client, None, None, None) == voice.Models("ears", "llm", "mouth")
            pipeline.server.models = [{"id": "adapter", "parent": "llm"}, {"id": "llm"}]
            assert (await voice.find_models(pipeline.client, "a", None, "b")).llm == "llm"
            with pytest.raises(voice.VoiceError, match="--asr, --tts; start it with: tonle serve --worker asr"):
                await voice.find_models(pipeline.client, None, None, None)

    asyncio.run(main())


def test_a_wav_file_is_read_wherever_it_is_cut() -> None:
    sound = wav_head() + bytes(range(100))
    for size in (1, 7, 44, 200):
        reader = voice.WavReader()
        pieces = [sound[at : at + size] for at in range(0, len(sound), size)]
        assert b"".join(map(reader.push, pieces)) == bytes(range(100))
        assert reader.format == (1, RATE)


async def started(server: VoiceServer, folder: Path, out: str) -> asyncio.subprocess.Process:
    (folder / "question.wav").write_bytes(SOUND)
    command = [str(PROGRAM), str(folder / "question.wav"), "--out", out, "--url", server.url]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, stderr=pipe)


@pytest.mark.parametrize("to_stdout", [False, True])
def test_the_program_writes_what_a_player_reads(tmp_path: Path, to_stdout: bool) -> None:
    async def main() -> None:
        async with piped() as pipeline:
            process = await started(pipeline.server, tmp_path, "-" if to_stdout else str(tmp_path / "answer.wav"))
            out, told = await process.communicate()
            assert process.returncode == 0, told.decode()
            assert f"Answer:   {' '.join(SENTENCES)}" in told.decode()
            assert "0.3 s of speech" in told.decode()
            with wave.open(io.BytesIO(out) if to_stdout else str(tmp_path / "answer.wav")) as sound:
                assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (RATE, 1, 2)
                assert len(sound.readframes(4 * SAMPLES)) == 2 * 3 * SAMPLES

    asyncio.run(main())


def test_the_program_stops_on_ctrl_c(tmp_path: Path) -> None:
    async def main() -> None:
        async with piped() as pipeline:
            server = pipeline.server
            server.text.clear()
            process = await started(server, tmp_path, "-")
            assert process.stdout is not None
            spoken = await process.stdout.readexactly(44 + 2 * SAMPLES)  # the first sentence is played
            assert spoken[44:] == b"\1\0" * SAMPLES
            process.send_signal(signal.SIGINT)
            _, told = await process.communicate()
            assert process.returncode == 130
            assert "first audio" in told.decode() and "stopped" in told.decode() and "Traceback" not in told.decode()
            await server.until(CHAT, state="hung up")

    asyncio.run(main())


def test_what_was_spoken_before_an_end_is_a_whole_file() -> None:
    async def main() -> None:
        async with piped() as pipeline:
            pipeline.server.text.clear()
            answer = pipeline.start()
            await pipeline.server.until(SPEECH, state="done")
            await stop_while_speaking(pipeline, answer)
            pipeline.out.write((1, RATE), b"\7\0")  # however much came
            pipeline.out.close()
            with wave.open(io.BytesIO(pipeline.file.getvalue())) as sound:
                assert 2 * sound.getnframes() == pipeline.out.num_bytes == len(pipeline.file.getvalue()) - 44

    asyncio.run(main())
