"""`AudioWriter`: samples to wav, mp3, opus, flac or pcm, as they come.

Does: hand out the bytes of each piece at once, but those of flac, whose header needs the length, at the end. Does not: synthesize
or send.
"""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np

from tonle.errors import ConfigError
from tonle.workers.kinds.read_audio import NEEDS_SOUNDFILE
from tonle.workers.kinds.resample import Resampler, Samples
from tonle.workers.speech_order import AudioFormat

OUT_RATE = 24_000  # Hz: what OpenAI's API has for pcm; the others have it, too

_UNKNOWN = 0xFFFF_FFFF
_LIBSNDFILE = {"mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS"), "flac": ("FLAC", "PCM_16")}


class AudioWriter:
    """`push` pieces, each gives the bytes to send. `seconds` is what was written so far."""

    def __init__(self, kind: AudioFormat, from_hz: int) -> None:
        self._resampler = Resampler(from_hz, OUT_RATE)
        self._kind = kind
        self._began = False
        self._num_samples = 0
        self._out = _Forward()
        self._file: Any = None
        if kind in _LIBSNDFILE:
            try:
                import soundfile
            except (ImportError, OSError) as error:
                raise ConfigError(f"{NEEDS_SOUNDFILE} ({error}); wav and pcm can be had without") from None
            container, subtype = _LIBSNDFILE[kind]
            # At a constant rate, the length of an mp3 follows from its size; where the header has it, is sent before it is known.
            constant = {"bitrate_mode": "CONSTANT", "compression_level": 0.6} if kind == "mp3" else {}
            self._file = soundfile.SoundFile(
                self._out, "w", samplerate=OUT_RATE, channels=1, format=container, subtype=subtype, **constant
            )

    @property
    def seconds(self) -> float:
        return self._num_samples / OUT_RATE

    def push(self, samples: Samples, *, last: bool) -> bytes:
        """If the first piece is the last, lengths in headers are right."""
        made = self._resampler.push(samples)
        if last:
            made = np.concatenate((made, self._resampler.finish()))
        self._num_samples += len(made)
        if self._file is not None:
            self._file.write(made)
            if last:
                self._file.close()
            elif self._kind == "flac":
                return b""
            return self._out.taken()
        body = (np.clip(made, -1, 1) * 32767).astype("<i2").tobytes()
        if self._kind == "wav" and not self._began:
            body = _wav_header(len(body) if last else _UNKNOWN) + body
        self._began = True
        return body


def _wav_header(num_bytes: int) -> bytes:
    """Mono, 16 bits. Of a stream, both lengths are the largest number: readers then go on to the end."""
    riff = min(num_bytes + 36, _UNKNOWN)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, OUT_RATE, 2 * OUT_RATE, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", riff, b"WAVE") + form + struct.pack("<4sI", b"data", num_bytes)


class _Forward:
    """A file that is written front to back. What is rewritten after it was taken is dropped: it has been sent."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._sent = 0
        self._at = 0

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")
        size = len(piece)
        gone = max(0, self._sent - self._at)  # of this piece
        place = max(0, self._at - self._sent)
        self._held[place : place + size - min(gone, size)] = piece[gone:]
        self._at += size
        return size

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        end = self._sent + len(self._held)
        self._at = max(0, to + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: end}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def taken(self) -> bytes:
        """What was written since the last time."""
        found = bytes(self._held)
        self._sent += len(found)
        self._held.clear()
        return found
