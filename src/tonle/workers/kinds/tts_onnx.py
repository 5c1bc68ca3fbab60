"""`Piper` and `Kokoro`: neural voices that run on ONNX Runtime, each by its own package.

Does: load a voice, speak a sentence. Does not: download voices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tonle.errors import ModelError
from tonle.workers.kinds.resample import Samples
from tonle.workers.kinds.stretch import stretch
from tonle.workers.kinds.voices import check_language, check_voice
from tonle.workers.speech_order import TtsOrder

# Kokoro's: by the first letter of a voice's name.
_LANGUAGES = {
    "a": "en-us", "b": "en-gb", "e": "es", "f": "fr-fr", "h": "hi", "i": "it", "j": "ja", "p": "pt-br", "z": "cmn",
}  # fmt: skip
_SLOWEST, _FASTEST = 0.5, 2.0  # Kokoro's; beyond, its speech is stretched


class Piper:
    """A voice file has one language, and one speaker or several by name."""

    def __init__(self, path: Path, device: str) -> None:
        try:
            import piper
        except ImportError:
            raise ModelError("tts with a Piper voice needs piper-tts: pip install 'tonle[voices]'") from None
        try:
            self._voice: Any = piper.PiperVoice.load(str(path), use_cuda=device.startswith("cuda"))
        except Exception as error:  # of ONNX Runtime's own classes
            raise ModelError(f"tts: {path} cannot be loaded: {error}") from None
        self._new_settings = piper.SynthesisConfig
        self.rate = int(self._voice.config.sample_rate)
        self._speakers: dict[str, int] = dict(getattr(self._voice.config, "speaker_id_map", None) or {})
        self._language = str(self._voice.config.espeak_voice)
        names = list(self._speakers) or [path.stem]
        self.facts: dict[str, Any] = {"synthesizer": "piper", "voices": names, "languages": [self._language]}

    def check(self, order: TtsOrder) -> None:
        check_voice(order.voice, self.facts["voices"])
        check_language(order.language, self._language)

    def speak(self, sentence: str, order: TtsOrder) -> Samples:
        settings = self._new_settings(
            speaker_id=self._speakers.get(order.voice, 0) if self._speakers else None, length_scale=1 / order.speed
        )
        chunks = [chunk.audio_float_array for chunk in self._voice.synthesize(sentence, syn_config=settings)]
        return np.concatenate(chunks).astype(np.float32) if chunks else np.empty(0, np.float32)


class Kokoro:
    """A folder has one model and many voices; the first letter of a voice's name is its language."""

    def __init__(self, folder: Path, language: str) -> None:
        try:
            import kokoro_onnx
        except ImportError:
            raise ModelError("tts with a Kokoro model needs kokoro-onnx: pip install 'tonle[voices]'") from None
        model, voices = min(folder.glob("*kokoro*.onnx")), min(folder.glob("voices*.bin"))
        try:
            self._model: Any = kokoro_onnx.Kokoro(str(model), str(voices))
        except Exception as error:
            raise ModelError(f"tts: {folder} cannot be loaded: {error}") from None
        self.rate = 24_000
        self._language = language
        self._names = sorted(self._model.get_voices())
        self.facts: dict[str, Any] = {
            "synthesizer": "kokoro",
            "voices": self._names,
            "languages": sorted(_LANGUAGES.values()),
        }

    def check(self, order: TtsOrder) -> None:
        check_voice(order.voice, self._names)

    def speak(self, sentence: str, order: TtsOrder) -> Samples:
        voice = order.voice if order.voice in self._names else _same_name(order.voice, self._names)
        language = order.language or _LANGUAGES.get(voice[0], self._language)
        speed = min(max(order.speed, _SLOWEST), _FASTEST)
        samples, _ = self._model.create(sentence, voice=voice, speed=speed, lang=language)
        return stretch(np.asarray(samples, np.float32), speed / order.speed, self.rate)


def _same_name(voice: str, names: list[str]) -> str:
    """Kokoro has voices named like OpenAI's: af_alloy, am_echo. Else the first."""
    return next((name for name in names if name.partition("_")[2] == voice), names[0])
