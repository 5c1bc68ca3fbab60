"""`Whisper`: a folder of Whisper weights for CTranslate2, with faster-whisper.

Does: languages, translation to English, prompts, temperatures, times of words. Does not: download: a model is a folder with
model.bin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tonle.errors import ConfigError, InvalidRequest, ModelError
from tonle.workers.kinds.read_audio import Pcm
from tonle.workers.transcript import AsrOrder, Segment, Word

MAX_PROMPT_CHARS = 4000  # Whisper uses the last 223 tokens


class Whisper:
    def __init__(self, model: str, device: str, options: dict[str, Any]) -> None:
        folder = Path(model)
        if not (folder / "model.bin").is_file():
            raise ModelError(
                f"asr: {model} must be a folder with model.bin, config.json and tokenizer.json of a Whisper model "
                "for CTranslate2: `hf download Systran/faster-whisper-small --local-dir faster-whisper-small` fetches one, "
                "ct2-transformers-converter makes one of a Whisper model for transformers"
            )
        try:
            import faster_whisper
        except ImportError:
            raise ModelError("asr with a Whisper model needs faster-whisper: pip install 'tonle[whisper]'") from None
        kind, _, index = device.partition(":")
        try:
            self._model: Any = faster_whisper.WhisperModel(
                str(folder),
                device="cuda" if kind == "cuda" else "cpu",
                device_index=int(index) if index.isdigit() else 0,
                compute_type=options.get("compute_type", "default"),
                local_files_only=True,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise ModelError(f"asr: {model} cannot be loaded: {error}") from None
        self._beam_size = options.get("beam_size", 5)
        if not isinstance(self._beam_size, int) or not 1 <= self._beam_size <= 20:
            raise ConfigError("beam_size must be an integer from 1 to 20", param="options")
        self._translates = bool(self._model.model.is_multilingual)
        self._languages = list(self._model.supported_languages)
        self.facts: dict[str, Any] = {
            "recognizer": "whisper",
            "languages": self._languages,
            "translates": self._translates,
        }
        self._found: Iterable[Any] = ()

    def begin(self, order: AsrOrder, pcm: Pcm) -> tuple[str | None, dict[str, str]]:
        if order.translate and not self._translates:
            raise InvalidRequest("this model cannot translate: it hears English only", param="model")
        if order.language is not None and order.language not in self._languages:
            raise InvalidRequest(
                f"this model does not know the language {order.language[:20]!r}; "
                "it must be a code such as en, fr or km, or be left out",
                param="language",
            )
        if order.prompt is not None and len(order.prompt) > MAX_PROMPT_CHARS:
            raise InvalidRequest(f"prompt must have at most {MAX_PROMPT_CHARS} characters", param="prompt")
        hotwords = " ".join(order.vocabulary) if order.vocabulary else None
        given = {} if order.temperature is None else {"temperature": order.temperature}
        self._found, about = self._model.transcribe(
            pcm.astype(np.float32) / 32768,
            language=order.language,
            task="translate" if order.translate else "transcribe",
            beam_size=self._beam_size,
            initial_prompt=order.prompt,
            hotwords=hotwords,
            word_timestamps=order.words,
            **given,
        )
        warnings = {"vocabulary": "is a hint to Whisper: other words may be heard, too"} if hotwords else {}
        return about.language, warnings

    def segments(self, order: AsrOrder, pcm: Pcm) -> Iterator[Segment]:
        for found in self._found:
            yield Segment(
                start=round(found.start, 3),
                end=round(found.end, 3),
                text=found.text,
                words=[_word(word) for word in found.words or () if order.words],
                tokens=list(found.tokens),
                temperature=found.temperature or 0.0,
                avg_logprob=found.avg_logprob,
                compression_ratio=found.compression_ratio,
                no_speech_prob=found.no_speech_prob,
            )


def _word(found: Any) -> Word:
    return Word(
        word=found.word.strip(),
        start=round(float(found.start), 3),
        end=round(float(found.end), 3),
        probability=round(float(found.probability), 4),
    )
