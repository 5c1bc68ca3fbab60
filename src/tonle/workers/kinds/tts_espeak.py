"""`Espeak`: eSpeak NG, by its C library: a hundred languages, small, on one core, no download.

Does: find the library and its data, choose voices, speak Khmer (which eSpeak NG has no rules for) by our own
(`khmer_sounds.py`). Does not: sound like a person; Piper, Kokoro and MMS voices do.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import Any

import numpy as np

from tonle.errors import InvalidRequest, ModelError
from tonle.workers.kinds.khmer_sounds import khmer_sounds
from tonle.workers.kinds.resample import Samples
from tonle.workers.kinds.speech_text import runs
from tonle.workers.kinds.stretch import stretch
from tonle.workers.kinds.voices import OPENAI_VOICES
from tonle.workers.speech_order import TtsOrder

KHMER = "km"
_SOUNDS_OF = "id"  # the language whose table of sounds has those of Khmer

WORDS_PER_MINUTE = 175  # at speed 1
_SLOWEST = 80  # eSpeak's; what is slower is stretched
MAX_SENTENCE_S = 300.0

# From speak_lib.h.
_SYNCHRONOUS, _NO_EXIT = 2, 0x8000
_RATE = 1
_UTF8, _PHONEMES, _END_PAUSE = 1, 0x100, 0x1000

_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class _VoiceEntry(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p), ("languages", ctypes.c_void_p), ("identifier", ctypes.c_char_p), ("gender", ctypes.c_ubyte),
        ("age", ctypes.c_ubyte), ("variant", ctypes.c_ubyte), ("xx1", ctypes.c_ubyte), ("score", ctypes.c_int),
        ("spare", ctypes.c_void_p),
    )  # fmt: skip


class Espeak:
    """The library holds its state in globals: one object in a process."""

    def __init__(self, language: str) -> None:
        self._library, data = _library()
        self.rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, _NO_EXIT)
        if self.rate <= 0:
            raise ModelError(
                "tts: eSpeak NG does not find its data; pip install espeakng-loader, or install espeak-ng again"
            )
        self._pieces: list[bytes] = []
        self._callback = _Callback(self._on_samples)  # must live as long as the library may call it
        self._library.espeak_SetSynthCallback(self._callback)
        self._languages, self._variants = self._listed()
        self._latin = language.lower()
        if self._latin not in self._languages:
            raise ModelError(f"tts: eSpeak NG has no language {language!r}")
        self.facts: dict[str, Any] = {
            "synthesizer": "espeak-ng",
            "voices": list(OPENAI_VOICES),
            "languages": sorted({*self._languages, KHMER}),
            "variants": sorted(self._variants),
        }

    def check(self, order: TtsOrder) -> None:
        self._chosen(order)

    def speak(self, sentence: str, order: TtsOrder) -> Samples:
        language, variant = self._chosen(order)
        given = [(language, sentence)] if language not in (None, KHMER) else runs(sentence, self._latin)
        spoken = [self._run(text, spoken_in, variant, order.speed) for spoken_in, text in given]
        return np.concatenate(spoken) if spoken else np.empty(0, np.float32)

    def _chosen(self, order: TtsOrder) -> tuple[str | None, str]:
        """Language, None if the script decides, and variant. Raises `InvalidRequest`."""
        name = order.voice.strip()
        language, plus, variant = name.lower().partition("+")
        if name.lower() in OPENAI_VOICES:
            language, variant = "", OPENAI_VOICES[name.lower()]
        elif not plus and language in self._variants:
            language, variant = "", language
        asked = (order.language or language).lower() or None
        if (variant and variant not in self._variants) or (language and not self._has(language)):
            raise InvalidRequest(
                f"there is no voice {name[:60]!r}; use one of {', '.join(OPENAI_VOICES)}, a language such as en-us, fr or km, "
                "or both as in fr+f2",
                param="voice",
            )
        if asked is not None and not self._has(asked):
            raise InvalidRequest(
                f"eSpeak NG does not speak {asked[:40]!r}; GET /v1/models lists its languages, such as en-us, fr or km",
                param="language",
            )
        return asked, self._variants.get(variant, "klatt4")

    def _has(self, language: str) -> bool:
        return language == KHMER or language in self._languages

    def _run(self, text: str, language: str, variant: str, speed: float) -> Samples:
        """One script's."""
        flags = _UTF8 | _END_PAUSE
        if language == KHMER:
            text, language, flags = f"[[{khmer_sounds(text)}]]", _SOUNDS_OF, flags | _PHONEMES
        elif language not in self._languages:  # a script that it has no language for
            language = self._latin
        library = self._library
        if library.espeak_SetVoiceByName(f"{language}+{variant}".encode()) != 0:
            raise ModelError(f"tts: the data of eSpeak NG lack the voice {language}+{variant}")
        words_per_minute = round(WORDS_PER_MINUTE * speed)
        library.espeak_SetParameter(_RATE, max(_SLOWEST, words_per_minute), 0)
        data = text.replace("\0", " ").encode("utf-8", "replace") + b"\0"
        self._pieces.clear()
        library.espeak_Synth(data, ctypes.c_size_t(len(data)), 0, 0, 0, flags, None, None)
        library.espeak_Synchronize()
        samples = np.frombuffer(b"".join(self._pieces), np.int16).astype(np.float32) / np.float32(32768)
        self._pieces.clear()
        return stretch(samples, max(1.0, _SLOWEST / words_per_minute), self.rate)

    def _on_samples(self, samples: Any, num: int, _events: int | None) -> int:
        """From C. 1 ends the synthesis."""
        if samples and num > 0:
            self._pieces.append(ctypes.string_at(samples, 2 * num))
        return int(sum(map(len, self._pieces)) > MAX_SENTENCE_S * self.rate * 2)

    def _listed(self) -> tuple[set[str], dict[str, str]]:
        """Languages, and variants by their names in lower case, as the files of them are called."""
        list_voices = self._library.espeak_ListVoices
        list_voices.restype = ctypes.POINTER(ctypes.POINTER(_VoiceEntry))
        languages = {
            entry.identifier.decode().rpartition("/")[2].lower()
            for entry in _until_null(list_voices(None))
            if b"!v" not in entry.identifier
        }
        wanted = _VoiceEntry(languages=ctypes.cast(ctypes.c_char_p(b"variant"), ctypes.c_void_p))
        names = [
            entry.identifier.decode().rpartition("/")[2] for entry in _until_null(list_voices(ctypes.byref(wanted)))
        ]
        return languages, {name.lower(): name for name in names}


def _until_null(entries: Any) -> list[_VoiceEntry]:
    found: list[_VoiceEntry] = []
    while entry := entries[len(found)]:
        found.append(entry.contents)
    return found


def _library() -> tuple[Any, bytes | None]:
    """The library and where its data are; None: where it looks itself. Raises `ModelError`."""
    try:
        import espeakng_loader

        return ctypes.CDLL(espeakng_loader.get_library_path()), espeakng_loader.get_data_path().encode()
    except (ImportError, OSError):
        pass
    if name := ctypes.util.find_library("espeak-ng"):
        return ctypes.CDLL(name), None
    raise ModelError(
        "tts without a model needs eSpeak NG: pip install 'tonle[speech]' (or the system's package libespeak-ng1); "
        "or give a voice of Piper, Kokoro or MMS"
    )
