"""The three paths of a voice conversation, scripted: what was said, what the model writes, sounds that can be told apart.

Does: answer, remember who asked what and who hung up, hold the model's text or the speech until it is told to go on. Does not:
recognize or make speech.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

QUESTION = "Name two rivers."
PIECES = ("The Me", "kong. Th", "e Tonle Sap", ". Both a", "re long.")
SENTENCES = ["The Mekong.", "The Tonle Sap.", "Both are long."]
MODELS: list[dict[str, Any]] = [
    {"id": "llm"},
    {"id": "ears", "kind": "asr"},
    {"id": "mouth", "kind": "tts", "facts": {"voices": ["low", "high"]}},
]
RATE, SAMPLES = 16_000, 1600  # 0.1 s per sentence


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: bytes
    state: str = "open"  # then: done, hung up

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class VoiceServer:
    """`text` and `speech` are set: cleared, the model stops after its second piece, and speech in the middle of a sentence."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    text: asyncio.Event = field(default_factory=asyncio.Event)
    speech: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    models: list[dict[str, Any]] = field(default_factory=lambda: MODELS)
    question: str = QUESTION
    failing: dict[str, int] = field(default_factory=dict)  # statuses by path

    def of(self, path: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.path == path]

    async def until(self, path: str, count: int = 1, state: str | None = None) -> None:
        """At least `count` requests of `path` came (and are in `state`)."""

        def is_so() -> bool:
            return sum(state in (None, asked.state) for asked in self.of(path)) >= count

        async with asyncio.timeout(120), self.changed:
            await self.changed.wait_for(is_so)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            request, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            asked = Asked(request.split()[1], headers, body)
            self.asked.append(asked)
            await self._tell()
            answering = asyncio.create_task(self._answer(asked, writer))
            hanging_up = asyncio.create_task(reader.read(1))
            await asyncio.wait({answering, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            asked.state = "done" if answering.done() else "hung up"
            for task in (answering, hanging_up):
                task.cancel()
            await asyncio.gather(answering, hanging_up, return_exceptions=True)
            await self._tell()
        writer.close()

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        status = self.failing.get(asked.path, 200)
        if status != 200:
            await _send(writer, json.dumps({"error": {"message": "out of order"}}).encode(), status=status)
        elif asked.path == "/v1/chat/completions":
            await _send(writer, *[_event(piece) for piece in PIECES[:2]], kind="text/event-stream", is_complete=False)
            await self.text.wait()
            events = [*(_event(piece) for piece in PIECES[2:]), _event("", "stop"), b"data: [DONE]\n\n"]
            writer.write(b"".join(events))
        elif asked.path == "/v1/audio/speech":
            number = SENTENCES.index(asked.json["input"]) + 1 if asked.json["input"] in SENTENCES else 0
            samples = struct.pack("<h", number) * SAMPLES
            await _send(writer, wav_head(), samples[:SAMPLES], kind="audio/wav", is_complete=False)
            await self.speech.wait()
            writer.write(samples[SAMPLES:])
        elif asked.path == "/v1/audio/transcriptions":
            await _send(writer, json.dumps({"text": f" {self.question}"}).encode())
        elif asked.path == "/v1/models":
            await _send(writer, json.dumps({"object": "list", "data": self.models}).encode())
        else:
            await _send(writer, b'{"status": "ok"}')
        await writer.drain()


@contextlib.asynccontextmanager
async def voice_server() -> AsyncIterator[VoiceServer]:
    found = VoiceServer()
    found.text.set()
    found.speech.set()
    server = await asyncio.start_server(found.handle, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()


@contextlib.contextmanager
def voice_server_in_thread() -> Iterator[tuple[VoiceServer, Callable[[Callable[[], object]], None]]]:
    """For tests without an event loop: the server, and what has a function run on its loop."""
    ready: Future[tuple[VoiceServer, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        over = asyncio.Event()
        async with voice_server() as found:
            ready.set_result((found, asyncio.get_running_loop(), over))
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    found, loop, over = ready.result(120)
    try:
        yield found, loop.call_soon_threadsafe
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(120)


def wav_head(num_bytes: int = 2 * SAMPLES) -> bytes:
    """One channel of 16-bit samples; with a chunk that readers must pass over."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, RATE, 2 * RATE, 2, 16)
    other = struct.pack("<4sI4s", b"junk", 3, b"abc\0")
    chunks = form + other + struct.pack("<4sI", b"data", num_bytes)
    return struct.pack("<4sI4s", b"RIFF", 4 + len(chunks) + num_bytes, b"WAVE") + chunks


def _event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "llm", "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\n".encode()


async def _send(
    writer: asyncio.StreamWriter, *pieces: bytes, status: int = 200, kind: str = "application/json",
    is_complete: bool = True,
) -> None:  # fmt: skip
    """A body that ends with the connection, unless it is complete."""
    length = f"content-length: {sum(map(len, pieces))}\r\n" if is_complete else ""
    head = f"HTTP/1.1 {status} OK\r\ncontent-type: {kind}\r\nx-request-id: req-1\r\nconnection: close\r\n{length}\r\n"
    writer.write(head.encode() + b"".join(pieces))
    await writer.drain()
