"""`Tts`: text to speech. A voice of Piper, Kokoro or MMS (VITS) if one is given; without a model, eSpeak NG.

Does: choose the synthesizer, speak sentence by sentence, encode what is asked for. Does not: synthesize (`tts_espeak.py` and
its neighbours), or answer requests (`endpoints/speech.py`).

Options: max_input_chars (default 4096), language (of Latin letters, where neither request nor voice has one; eSpeak: en-us).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from tonle.errors import ConfigError, InvalidRequest, ModelError, TonleError
from tonle.workers.kind import Job, Kind, Result
from tonle.workers.kinds.resample import Samples
from tonle.workers.kinds.speech_text import sentences
from tonle.workers.kinds.write_audio import OUT_RATE, AudioWriter
from tonle.workers.speech_order import TtsOrder, TtsPiece

MAX_INPUT_CHARS = 4096
MIN_SPEED, MAX_SPEED = 0.25, 4.0
_OPTIONS = {"max_input_chars", "language"}


class Synthesizer(Protocol):
    rate: int  # Hz
    facts: dict[str, Any]

    def check(self, order: TtsOrder) -> None:
        """Raises `InvalidRequest` if it has no such voice or language."""
        ...

    def speak(self, sentence: str, order: TtsOrder) -> Samples: ...


class Tts(Kind):
    batches: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def load(self, model: str | None, device: str, options: dict[str, Any]) -> None:
        if unknown := sorted(options.keys() - _OPTIONS):
            raise ConfigError(f"tts has no option {unknown[0]}; it has {', '.join(sorted(_OPTIONS))}", param="options")
        self._max_chars = options.get("max_input_chars", MAX_INPUT_CHARS)
        if not isinstance(self._max_chars, int) or not 1 <= self._max_chars <= 1_000_000:
            raise ConfigError("max_input_chars must be an integer from 1 to 1000000", param="options")
        self._synthesizer = _synthesizer(model, device, options.get("language", "en-us"))

    def describe(self) -> dict[str, Any]:
        return {**self._synthesizer.facts, "sample_rate": OUT_RATE, "max_input_chars": self._max_chars}

    def warm_up(self) -> list[Job]:
        return [Job({"text": "Ready.", "format": "pcm", "voice": self._synthesizer.facts["voices"][0]})]

    def run(self, batch: list[Job]) -> list[Result | TonleError]:
        return [self._whole(job) for job in batch]

    def stream(self, job: Job) -> Iterator[Result]:
        order = msgspec.convert(job.fields, TtsOrder)
        pieces = sentences(self._checked(order).text)
        writer = AudioWriter(order.format, self._synthesizer.rate)
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            data = writer.push(self._synthesizer.speak(piece, order), last=last)
            if last and not writer.seconds:
                raise InvalidRequest("input has nothing that can be spoken", param="input")
            if data or last:
                yield Result(msgspec.to_builtins(TtsPiece(seconds=writer.seconds, end=last)), (data,))

    def _whole(self, job: Job) -> Result | TonleError:
        try:
            pieces = list(self.stream(job))
        except TonleError as error:
            return error
        return Result(pieces[-1].fields, (b"".join(piece.media[0] for piece in pieces),))

    def _checked(self, order: TtsOrder) -> TtsOrder:
        if not order.text.strip():
            raise InvalidRequest("input has nothing that can be spoken", param="input")
        if len(order.text) > self._max_chars:
            raise InvalidRequest(
                f"input has {len(order.text)} characters; at most {self._max_chars} are allowed", param="input"
            )
        if not MIN_SPEED <= order.speed <= MAX_SPEED:
            raise InvalidRequest(f"speed must be from {MIN_SPEED:g} to {MAX_SPEED:g}", param="speed")
        self._synthesizer.check(order)
        return order


def _synthesizer(model: str | None, device: str, language: str) -> Synthesizer:
    """By what the model's files are. Raises `ModelError`."""
    if model is None:
        from tonle.workers.kinds.tts_espeak import Espeak

        return Espeak(language)
    path = Path(model)
    if path.suffix == ".onnx" and path.with_name(path.name + ".json").is_file():
        from tonle.workers.kinds.tts_onnx import Piper

        return Piper(path, device)
    if path.is_dir() and list(path.glob("*kokoro*.onnx")) and list(path.glob("voices*.bin")):
        from tonle.workers.kinds.tts_onnx import Kokoro

        return Kokoro(path, language)
    if (path / "config.json").is_file() and b'"vits"' in (path / "config.json").read_bytes():
        from tonle.workers.kinds.tts_vits import Vits

        return Vits(path, device)
    raise ModelError(
        f"tts: {model} is no voice. Give a Piper voice (NAME.onnx with NAME.onnx.json beside it), a folder with a Kokoro model "
        "(kokoro….onnx and voices….bin), or a folder with a VITS model for transformers (such as facebook/mms-tts-khm); "
        "without a model, eSpeak NG speaks"
    )
