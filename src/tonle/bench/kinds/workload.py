"""`KindWorkload`: the requests of a kind, one series per level and phase.

Does: draw texts and sounds by a seed, and build requests of them; the same seed gives the same requests, whatever the load.
Does not: read answers (`answers.py`) or send.
"""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tonle.bench.answer_reader import AnswerReader
from tonle.bench.kinds.answers import ItemsAnswer, RankingAnswer, SpeechAnswer, TranscriptAnswer
from tonle.bench.kinds.form import encode_form
from tonle.bench.kinds.metrics import RequestKind
from tonle.bench.kinds.settings import PATHS
from tonle.bench.kinds.sounds import MadeSounds, Sounds, WavFiles
from tonle.bench.kinds.texts import Texts
from tonle.bench.options import BenchOptions, Pause, Span
from tonle.bench.workload import Job, Phase, encode_body

ITEMS: dict[RequestKind, Span] = {"embeddings": Span(1, 1), "rerank": Span(10, 10), "images": Span(1, 1)}
SENTENCES: dict[RequestKind, Span] = {
    "embeddings": Span(1, 16),
    "rerank": Span(2, 12),
    "tts": Span(1, 4),
    "images": Span(1, 1),
}
SOUND_SECONDS = Pause(2.0, 15.0)
MAX_REPLY_BYTES = 256 * 1024**2  # images and vectors in JSON are large


@dataclass(slots=True, kw_only=True)
class KindJob(Job):
    make_answer: Callable[[], AnswerReader]
    streams: bool = False

    @property
    def is_streamed(self) -> bool:
        return self.streams

    def new_answer(self) -> AnswerReader:
        return self.make_answer()


@dataclass(frozen=True, slots=True)
class Form:
    """A sound, ready to be uploaded."""

    body: bytes
    content_type: str
    seconds: float


def kind_workload(options: BenchOptions, model: str) -> KindWorkload:
    """Raises `ConfigError` if a file, or a folder of sounds, cannot be used."""
    if options.kind == "asr":
        return SoundWorkload(options, model)
    return TextWorkload(options, model)


class KindWorkload(abc.ABC):
    """Owns how far a file has been sent. Levels go on where the one before stopped, and around at the end."""

    kind: str  # of prompts, for the report

    def __init__(self, options: BenchOptions, model: str) -> None:
        self._options = options
        self._model = model
        self._num_sent = 0  # jobs that were made, also for a warm-up

    def jobs(self, level: int, phase: Phase) -> Iterator[Job]:
        index = 0
        while True:
            place, self._num_sent = self._num_sent, self._num_sent + 1
            yield self._job(index, place, random.Random(f"{self._options.seed}/{level}/{phase}/{index}"))
            index += 1

    @abc.abstractmethod
    def _job(self, index: int, place: int, rng: random.Random) -> Job:
        """The `index`-th of a level, the `place`-th of the run."""

    def num_requests(self, level: int, num_jobs: int | None) -> int | None:
        return num_jobs

    def pass_over(self, num_jobs: int) -> None:
        self._num_sent += num_jobs

    def notes(self) -> list[str]:
        return []


class TextWorkload(KindWorkload):
    """Embeddings, rankings, speech and images: all begin with texts."""

    def __init__(self, options: BenchOptions, model: str) -> None:
        super().__init__(options, model)
        self._kind: RequestKind = options.kind
        self._items = options.items or ITEMS.get(options.kind, Span(1, 1))
        self._texts = Texts(
            options.file, options.sentences or SENTENCES[options.kind], pictures=options.kind == "images"
        )
        self.kind = self._texts.name

    def notes(self) -> list[str]:
        per_request = 1 if self._kind == "images" else self._items.high
        there = self._texts.num_of_file
        if self.kind != "file" or there is None or self._num_sent * per_request <= there:
            return []
        return ["the file's texts were sent more than once: caches of the server may have answered"]

    def _job(self, index: int, place: int, rng: random.Random) -> Job:
        count = self._items.draw(rng)
        first = place * self._items.high  # a file's texts in their order, none twice before all were sent
        fields: dict[str, Any]
        if self._kind == "embeddings":
            fields = {"input": [self._texts.text(rng, first + each) for each in range(count)]}
            return self._request(index, fields, lambda: ItemsAnswer(count, "embeddings"))
        if self._kind == "rerank":
            documents = [self._texts.text(rng, first + each) for each in range(count)]
            fields = {"query": self._texts.sentence(rng), "documents": documents}
            top_n = self._options.extra_body.get("top_n")
            results = min(count, top_n) if isinstance(top_n, int) else count
            return self._request(index, fields, lambda: RankingAnswer(count, results))
        text = self._texts.text(rng, place)
        if self._kind == "images":
            return self._request(index, {"prompt": text, "n": count}, lambda: ItemsAnswer(count, "images"))
        fields = {"input": text, "voice": "alloy", "response_format": "wav"}
        is_pcm = self._options.extra_body.get("response_format") == "pcm"
        return self._request(index, fields, lambda: SpeechAnswer(is_pcm=is_pcm), streams=True)

    def _request(
        self, index: int, fields: dict[str, Any], make_answer: Callable[[], AnswerReader], *, streams: bool = False
    ) -> Job:
        path = PATHS[self._kind]
        body = encode_body(path, {"model": self._model, **fields}, self._options.extra_body)
        return KindJob(
            index, path, body, None, max_reply_bytes=MAX_REPLY_BYTES, streams=streams, make_answer=make_answer
        )


class SoundWorkload(KindWorkload):
    """Transcriptions. A sound's request is built once in each process and used again."""

    def __init__(self, options: BenchOptions, model: str) -> None:
        super().__init__(options, model)
        self._sounds: Sounds = (
            MadeSounds(options.audio_seconds or SOUND_SECONDS, options.seed) if options.file is None else WavFiles(options.file)
        )  # fmt: skip
        self.kind = self._sounds.name
        self._forms: dict[int, Form] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which reads the sounds itself."""
        return self.__dict__ | {"_forms": {}}

    def notes(self) -> list[str]:
        return self._sounds.notes

    def jobs(self, level: int, phase: Phase) -> Iterator[Job]:
        for place in range(len(self._sounds)):  # now: reading them takes nothing of the measured time
            self._form(place)
        return super().jobs(level, phase)

    def _job(self, index: int, place: int, rng: random.Random) -> Job:
        form = self._form(place % len(self._sounds))
        return KindJob(
            index, PATHS["asr"], form.body, None, content_type=form.content_type,
            make_answer=lambda: TranscriptAnswer(form.seconds),
        )  # fmt: skip

    def _form(self, place: int) -> Form:
        if place not in self._forms:
            sound = self._sounds.read(place)
            fields = {"model": self._model, "response_format": "json"} | self._options.extra_body
            fields = {name: value for name, value in fields.items() if value is not None}
            body, content_type = encode_form(fields, file=sound.content, filename=sound.name, content_type="audio/wav")
            self._forms[place] = Form(body, content_type, sound.seconds)
        return self._forms[place]
