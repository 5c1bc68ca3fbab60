"""One recognizer and one synthesizer for all tests: eSpeak NG has its state in globals, PocketSphinx takes a second to load."""

from __future__ import annotations

import pytest

from tests.unit.workers.sounds import MISSING, soundfile
from tonle.workers.kinds.asr import Asr
from tonle.workers.kinds.tts import Tts


@pytest.fixture(scope="session")
def tts() -> Tts:
    soundfile()
    pytest.importorskip("espeakng_loader", reason=f"eSpeak NG is {MISSING}")
    kind = Tts()
    kind.load(None, "cpu", {})
    return kind


@pytest.fixture(scope="session")
def asr() -> Asr:
    soundfile()
    pytest.importorskip("pocketsphinx", reason=f"PocketSphinx is {MISSING}")
    kind = Asr()
    kind.load(None, "cpu", {"max_audio_s": 60})
    return kind
