"""A spoken question in, a spoken answer out: speech to text, a language model, text to speech, all three streamed.

    tonle serve --worker asr --worker tts           # in one terminal
    pip install httpx                               # in another
    python examples/voice.py question.wav --out answer.wav
    python examples/voice.py question.wav --out - | aplay

Each sentence is spoken as soon as the model has written it, while it writes the next. Ctrl-C stops everything: what is asked for
and not yet there is cancelled on the server, and what was spoken until then is kept. All requests carry one X-Session-Id, so
the audit trail has them as one chain. The times are written to stderr; with --explain, also where the server spent them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import struct
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from tonle.workers.sentences import SentenceSplitter, speakable

SYSTEM = (
    "You are spoken to, and your answer is read aloud: answer briefly, in plain sentences, without lists and markup."
)
HINT = "start it with: tonle serve --worker asr --worker tts"
TIMEOUT = httpx.Timeout(300, connect=10)


class VoiceError(Exception):
    """What went wrong, in words."""


@dataclass
class Leg:
    """One request. Times are seconds since the conversation began; None: it did not come so far."""

    name: str
    began_s: float
    first_s: float | None = None  # the first token, the first sound
    ended_s: float | None = None
    request_id: str = ""  # `tonle explain` takes it
    text: str = ""


@dataclass
class Timeline:
    legs: list[Leg] = field(default_factory=list)
    marks: dict[str, float] = field(default_factory=dict)  # seconds, in the order in which things happened
    start: float = field(default_factory=time.perf_counter)

    def now(self) -> float:
        return time.perf_counter() - self.start

    def mark(self, name: str) -> None:
        """The first time counts."""
        self.marks.setdefault(name, self.now())

    @contextlib.contextmanager
    def leg(self, name: str, text: str = "") -> Iterator[Leg]:
        leg = Leg(name, self.now(), text=text)
        self.legs.append(leg)
        yield leg
        leg.ended_s = self.now()

    def lines(self) -> list[str]:
        found = [f"{name:<16}{seconds * 1000:>8.0f} ms" for name, seconds in self.marks.items()]
        found.append(f"\n{'leg':<16}{'asked':>8} {'first':>8} {'ended':>8}     request")
        for leg in self.legs:
            times = (
                f"{'–' if at is None else f'{at * 1000:.0f}':>8}" for at in (leg.began_s, leg.first_s, leg.ended_s)
            )
            found.append(f"{leg.name:<16}{' '.join(times)} ms  {leg.request_id}  {leg.text}".rstrip())
        return found


@dataclass(frozen=True)
class Models:
    asr: str
    llm: str
    tts: str


class Voice:
    """Questions and answers, all requests under one session id. Cancelling `answer` cancels the requests that are open."""

    def __init__(
        self, client: httpx.AsyncClient, models: Models, *, voice: str | None = None, system: str = SYSTEM
    ) -> None:
        self.session = f"voice-{uuid.uuid4().hex}"
        self._client = client
        self._models = models
        self._voice = voice
        self._system = system

    async def answer(self, sound: bytes, out: WavWriter, timeline: Timeline) -> str:
        """Speak the answer to the question in `sound` into `out`. Returns it as text."""
        question = await self._transcribe(sound, timeline)
        sentences: asyncio.Queue[str | None] = asyncio.Queue()  # None: that was the last
        try:
            async with asyncio.TaskGroup() as both:  # if one fails, the other is cancelled
                written = both.create_task(self._write(question, sentences, timeline))
                both.create_task(self._speak(sentences, out, timeline))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return written.result()

    async def _transcribe(self, sound: bytes, timeline: Timeline) -> str:
        files = {"file": ("question.wav", sound, "audio/wav")}
        with timeline.leg("transcription") as leg:
            async with self._post(
                "/v1/audio/transcriptions", leg, files=files, data={"model": self._models.asr}
            ) as reply:
                leg.text = json.loads(await reply.aread())["text"].strip()
        timeline.mark("transcribed")
        if not leg.text:
            raise VoiceError("nothing was said in this recording")
        return leg.text

    async def _write(self, question: str, sentences: asyncio.Queue[str | None], timeline: Timeline) -> str:
        """Have the model answer, and hand on each sentence when it has ended."""
        messages = [{"role": "system", "content": self._system}, {"role": "user", "content": question}]
        body = {"model": self._models.llm, "messages": messages, "stream": True}
        splitter, text = SentenceSplitter(), ""

        def hand_on(found: list[str]) -> None:
            for sentence in filter(None, map(speakable, found)):
                timeline.mark("first sentence")
                sentences.put_nowait(sentence)

        with timeline.leg("language model") as leg:
            async with self._post("/v1/chat/completions", leg, json=body) as reply:
                async for piece in pieces_of(reply):
                    timeline.mark("first token")
                    leg.first_s = leg.first_s or timeline.now()
                    text += piece
                    hand_on(splitter.push(piece))
        timeline.mark("text complete")
        hand_on(splitter.end())
        sentences.put_nowait(None)
        return text

    async def _speak(self, sentences: asyncio.Queue[str | None], out: WavWriter, timeline: Timeline) -> None:
        """One sentence after the other, in their order."""
        while (sentence := await sentences.get()) is not None:
            body = {"model": self._models.tts, "input": sentence, "response_format": "wav"}
            if self._voice:
                body["voice"] = self._voice
            with timeline.leg("speech", sentence) as leg:
                async with self._post("/v1/audio/speech", leg, json=body) as reply:
                    reader = WavReader()
                    async for piece in reply.aiter_bytes():
                        samples = reader.push(piece)
                        if samples:
                            timeline.mark("first audio")
                            leg.first_s = leg.first_s or timeline.now()
                            out.write(reader.format, samples)
        timeline.mark("speech complete")

    @contextlib.asynccontextmanager
    async def _post(self, path: str, leg: Leg, **content: Any) -> AsyncIterator[httpx.Response]:
        """The reply while it comes; leaving early closes the connection, and the server stops working on it."""
        headers = {"X-Session-Id": self.session}
        async with self._client.stream("POST", path, headers=headers, **content) as reply:
            leg.request_id = reply.headers.get("x-request-id", "")
            if reply.is_error:
                raise VoiceError(f"{path}: {message_of(await reply.aread())}")
            yield reply


async def pieces_of(reply: httpx.Response) -> AsyncIterator[str]:
    """The text of a streamed chat completion."""
    async for line in reply.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise VoiceError(message_of(data.encode()))
        for choice in chunk["choices"]:
            if piece := choice["delta"].get("content"):
                yield piece


def message_of(body: bytes) -> str:
    """Of an error as the OpenAI API has them."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return body[:200].decode(errors="replace")


# -- sound: WAV with 16-bit samples

Format = tuple[int, int]  # channels, samples per second
UNKNOWN_BYTES = 0x7FFFFFFF  # of a file that is not complete


class WavReader:
    """The samples of a WAV file that still comes."""

    format: Format

    def __init__(self) -> None:
        self._head: bytes | None = b""  # None: it is complete

    def push(self, piece: bytes) -> bytes:
        if self._head is None:
            return piece
        self._head += piece
        at = 12  # after RIFF, the size and WAVE
        while len(self._head) >= at + 8:
            name, size = struct.unpack_from("<4sI", self._head, at)
            if name == b"data":
                samples, self._head = self._head[at + 8 :], None
                return samples
            if name == b"fmt " and len(self._head) >= at + 24:
                kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", self._head, at + 8)
                if (kind, bits) != (1, 16):
                    raise VoiceError(f"expected samples of 16 bits, got {bits} (format {kind})")
                self.format = (channels, rate)
            at += 8 + size + size % 2
        return b""


class WavWriter:
    """Begins the file with the first samples; at the end sets its length, where the file lets it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._format: Format | None = None
        self.num_bytes = 0

    def write(self, format_: Format, samples: bytes) -> None:
        if self._format is None:
            self._format = format_
            self._file.write(wav_head(format_, UNKNOWN_BYTES))
        if format_ != self._format:
            raise VoiceError(f"the speech changed from {self._format} to {format_} (channels, samples per second)")
        self._file.write(samples)
        self._file.flush()
        self.num_bytes += len(samples)

    @property
    def seconds(self) -> float:
        return 0.0 if self._format is None else self.num_bytes / (2 * self._format[0] * self._format[1])

    def close(self) -> None:
        if self._format is not None and self._file.seekable():
            self._file.seek(0)
            self._file.write(wav_head(self._format, self.num_bytes))


def wav_head(format_: Format, num_bytes: int) -> bytes:
    channels, rate = format_
    about = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    riff_bytes = min(num_bytes + 36, UNKNOWN_BYTES)
    return (
        struct.pack("<4sI4s4sI", b"RIFF", riff_bytes, b"WAVE", b"fmt ", 16)
        + about
        + struct.pack("<4sI", b"data", num_bytes)
    )


# -- the program


async def find_models(client: httpx.AsyncClient, asr: str | None, llm: str | None, tts: str | None) -> Models:
    """Those that were named, else the first of each kind that the server lists."""
    reply = await client.get("/v1/models")
    if reply.is_error:
        raise VoiceError(message_of(reply.content))
    by_kind: dict[str, str] = {}
    for entry in reply.json()["data"]:
        if not entry.get("parent"):  # no adapter
            by_kind.setdefault(entry.get("kind") or "llm", entry["id"])
    asr, llm, tts = asr or by_kind.get("asr"), llm or by_kind.get("llm"), tts or by_kind.get("tts")
    if not asr or not llm or not tts:
        named = {"--asr": asr, "--llm": llm, "--tts": tts}
        missing = ", ".join(flag for flag, name in named.items() if not name)
        raise VoiceError(f"this server lists no model for {missing}; {HINT}")
    return Models(asr, llm, tts)


async def explained(client: httpx.AsyncClient, timeline: Timeline) -> list[str]:
    """Where the server spent the time of each leg."""
    found = []
    for leg in timeline.legs:
        if leg.request_id:
            reply = await client.get(f"/v1/requests/{leg.request_id}/explain")
            sentences = reply.json()["sentences"] if reply.is_success else [message_of(reply.content)]
            found.append(f"{leg.name}: {' '.join(sentences)}")
    return found


async def run(options: argparse.Namespace, timeline: Timeline) -> None:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with httpx.AsyncClient(base_url=options.url, headers=headers, timeout=TIMEOUT) as client:
        models = await find_models(client, options.asr, options.llm, options.tts)
        voice = Voice(client, models, voice=options.voice, system=options.system)
        file = sys.stdout.buffer if options.out == "-" else Path(options.out).open("wb")  # noqa: ASYNC230, SIM115
        out = WavWriter(file)
        timeline.start = time.perf_counter()
        try:
            text = await voice.answer(options.question.read_bytes(), out, timeline)
            say(f"Question: {timeline.legs[0].text}\nAnswer:   {text}\n")
        finally:
            out.close()
            file.close()
            say("\n".join(timeline.lines()))
            say(f"\n{out.seconds:.1f} s of speech, session {voice.session}")
        if options.explain:
            say("\n" + "\n".join(await explained(client, timeline)))


def say(text: str) -> None:
    print(text, file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description="A spoken question in, a spoken answer out.")
    parser.add_argument("question", type=Path, help="a WAV file")
    parser.add_argument("--out", default="answer.wav", help="a WAV file; -: stdout, for a player")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--asr", help="the model that transcribes; the first that the server lists")
    parser.add_argument("--llm", help="the model that answers")
    parser.add_argument("--tts", help="the model that speaks")
    parser.add_argument("--voice", help="one of the voices of the model that speaks")
    parser.add_argument("--system", default=SYSTEM, help="what the model that answers is told")
    parser.add_argument("--explain", action="store_true", help="also say where the server spent the time of each leg")
    options = parser.parse_args()
    try:
        asyncio.run(run(options, Timeline()))
    except KeyboardInterrupt:
        say("stopped")
        return 130
    except (VoiceError, httpx.HTTPError, OSError) as problem:
        say(f"error: {problem or type(problem).__name__}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
