"""What is sent to be transcribed: the WAV files of a folder, or made-up tones and noise.

Does: find, check and read files; make sounds from a seed. Does not: build requests.

Made-up sounds have no words: what a server hears in them means nothing, only how long it takes. Models that stop at silence, or
repeat themselves on noise, may be faster or slower than on speech.
"""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tonle.bench.kinds.wav import wav_file, wav_seconds
from tonle.bench.options import Pause
from tonle.errors import ConfigError

RATE = 16_000  # samples per second: what recognizers take
MAX_BYTES = 512 * 1024**2  # of all sounds together: they are kept in memory
MAX_FILES = 10_000
MADE_SOUNDS = 32  # different ones, or as many as fit into
MADE_BYTES = 128 * 1024**2
PIECE_S = (0.1, 0.6)  # of one tone, noise or silence


@dataclass(frozen=True, slots=True)
class Sound:
    name: str
    content: bytes
    seconds: float


class Sounds(Protocol):
    name: str  # for the report
    notes: list[str]

    def __len__(self) -> int: ...

    def read(self, place: int) -> Sound:
        """Raises `ConfigError` if a file is no longer what it was."""


class WavFiles:
    """Owns the list of a folder's files. They are read when they are asked for: in each process of the client once."""

    def __init__(self, folder: Path) -> None:
        self.name = "wav files"
        self.notes: list[str] = []
        if not folder.exists():
            raise ConfigError(f"cannot read {folder}: there is no such folder of WAV files", param="data")
        found = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
        self._paths = [path for path in found if path.suffix.lower() == ".wav" and path.is_file()]
        if not self._paths:
            raise ConfigError(f"{folder} holds no .wav files to be transcribed", param="data")
        size = sum(path.stat().st_size for path in self._paths)
        if size > MAX_BYTES or len(self._paths) > MAX_FILES:
            raise ConfigError(
                f"{folder} holds {len(self._paths)} .wav files of {size / 2**20:.0f} MiB; at most {MAX_FILES} files of "
                f"{MAX_BYTES // 2**20} MiB are kept in memory: name a folder with a part of them",
                param="data",
            )
        others = sum(path.is_file() for path in found) - len(self._paths)
        if others:
            self.notes.append(f"{others} other files of {folder} were not sent: only .wav files are")

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, place: int) -> Sound:
        path = self._paths[place]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", param="data") from None
        seconds = wav_seconds(content)
        if seconds is None:
            raise ConfigError(f"{path} is no WAV file, or holds no sound", param="data")
        return Sound(path.name, content, seconds)


class MadeSounds:
    """Owns nothing but a seed: the same one makes the same sounds."""

    def __init__(self, seconds: Pause, seed: int) -> None:
        self.name = "made sounds"
        self.notes = [
            "sounds are tones and noise without words: their transcripts mean nothing, only the speed does "
            "(--data FOLDER sends WAV files)"
        ]
        self._seconds = seconds
        self._seed = seed
        self._count = max(1, min(MADE_SOUNDS, int(MADE_BYTES // (2 * RATE * seconds.high))))

    def __len__(self) -> int:
        return self._count

    def read(self, place: int) -> Sound:
        rng = random.Random(f"{self._seed}/sound/{place}")
        wanted = max(1, round(self._seconds.draw(rng) * RATE))
        samples = bytearray()
        while len(samples) < 2 * wanted:
            samples += _piece(rng)
        return Sound(f"{place}.wav", wav_file(bytes(samples[: 2 * wanted]), RATE), wanted / RATE)


def _piece(rng: random.Random) -> bytes:
    """A tone three times in five, otherwise noise or silence. 16-bit samples."""
    count = round(rng.uniform(*PIECE_S) * RATE)
    what = rng.randrange(5)
    if what == 3:
        return rng.randbytes(2 * count)
    if what == 4:
        return bytes(2 * count)
    period = round(RATE / rng.uniform(90, 400))  # samples, of a pitch that voices have
    height = rng.uniform(2_000, 12_000)
    wave = [round(height * sum(math.sin(math.tau * part * at / period) / part for part in (1, 2, 3)) / 2)
            for at in range(period)]  # fmt: skip
    return (array("h", wave) * (count // period + 1)).tobytes()[: 2 * count]
