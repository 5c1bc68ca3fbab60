"""`Vits`: a VITS voice with transformers, such as Meta's MMS voices for a thousand languages (Khmer: facebook/mms-tts-khm).

Does: load a folder, speak a sentence. Does not: download.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tonle.errors import ModelError
from tonle.workers.kinds.resample import Samples
from tonle.workers.kinds.voices import check_language, check_voice
from tonle.workers.speech_order import TtsOrder


class Vits:
    """One speaker, one language."""

    def __init__(self, folder: Path, device: str) -> None:
        try:
            import torch
            from transformers import AutoTokenizer, VitsModel
        except ImportError:
            raise ModelError("tts with a VITS voice needs transformers: pip install 'tonle[hf]'") from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = VitsModel.from_pretrained(folder, local_files_only=True)
            self._model = model.to(device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"tts: {folder} cannot be loaded: {error}") from None
        if getattr(self._tokenizer, "is_uroman", False):
            raise ModelError(f"tts: {folder} wants its text in Latin letters (uroman), which Tonle does not write")
        self._torch, self._device = torch, device
        self.rate = int(self._model.config.sampling_rate)
        self._language = str(getattr(self._tokenizer, "language", None) or "und")
        self._rate_of_speech = float(self._model.config.speaking_rate)
        self.facts: dict[str, Any] = {"synthesizer": "vits", "voices": [folder.name], "languages": [self._language]}

    def check(self, order: TtsOrder) -> None:
        check_voice(order.voice, self.facts["voices"])
        if order.language not in (None, "km") or self._language not in ("khm", "km"):
            check_language(order.language, self._language)

    def speak(self, sentence: str, order: TtsOrder) -> Samples:
        inputs = self._tokenizer(sentence, return_tensors="pt").to(self._device)
        if inputs["input_ids"].shape[-1] < 2:  # no letter that the voice knows
            return np.empty(0, np.float32)
        self._model.speaking_rate = self._rate_of_speech * order.speed
        with self._torch.inference_mode():
            waveform = self._model(**inputs).waveform[0]
        return np.asarray(waveform.float().cpu().numpy(), np.float32)
