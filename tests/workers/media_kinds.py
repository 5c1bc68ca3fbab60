"""Small kinds in place of speech models, with endpoints of OpenAI's shape: real processes, real media, no model.

`Recite` transcribes: the length of the sound is its text. `Speak` says a text as bytes, a word at a time.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tonle.edge.client_connection import Sink
from tonle.errors import TonleError
from tonle.protocol.multipart import parse_form
from tonle.workers.kind import Job, Kind, Result
from tonle.workers.pool import WorkerPool
from tonle.workers.worker_request import WorkerRequest


class Recite(Kind):
    def load(self, model: str | None, device: str, options: dict[str, Any]) -> None:
        self.flag = options.get("die_unless")

    def run(self, batch: list[Job]) -> list[Result | TonleError]:
        if self.flag is not None and not Path(self.flag).exists():
            Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [Result({"text": f"{len(job.media[0])} bytes in {job.fields['language']}"}) for job in batch]


class Speak(Kind):
    batches = False
    streams = True

    def load(self, model: str | None, device: str, options: dict[str, Any]) -> None:
        pass

    def run(self, batch: list[Job]) -> list[Result | TonleError]:
        return [Result({}, (job.fields["text"].encode(),)) for job in batch]

    def stream(self, job: Job) -> Iterator[Result]:
        for word in job.fields["text"].split():
            yield Result({}, (word.encode(),))


class Paint(Kind):
    """In place of `Images`: a picture is what was asked for, as text."""

    batches = False

    def load(self, model: str | None, device: str, options: dict[str, Any]) -> None:
        pass

    def run(self, batch: list[Job]) -> list[Result | TonleError]:
        return [self._paint(job.fields) for job in batch]

    def _paint(self, fields: dict[str, Any]) -> Result:
        text = f"{fields['prompt']} {fields['width']}x{fields['height']} {fields['seed']}"
        return Result({name: fields[name] for name in ("width", "height", "seed")}, (text.encode(),))


async def transcriptions(request: WorkerRequest, pool: WorkerPool, sink: Sink) -> None:
    form = parse_form(request.body, request.header("content-type"))
    sound = form.file("file")
    assert sound is not None
    result = await pool.run(Job({"language": form.text("language")}, (sound.data,)))
    sink.head(200, {"content-type": "application/json", "x-tonle-audio-seconds": "3"})
    sink.data(msgspec.json.encode(result.fields))


async def speech(request: WorkerRequest, pool: WorkerPool, sink: Sink) -> None:
    text = msgspec.json.decode(request.body)["input"]
    sink.head(200, {"content-type": "audio/pcm"})
    async with contextlib.aclosing(pool.stream(Job({"text": text}))) as pieces:
        async for piece in pieces:
            sink.data(bytes(piece.media[0]))
