"""`SoundMeter`: how long a sound is, from its bytes as they arrive.

Does: find the samples of a WAV file, or take raw PCM as it is; count their seconds. Does not: keep or decode them, or know any
other format: of MP3 and Opus, only that bytes came.
"""

from __future__ import annotations

import struct

MAX_HEAD_BYTES = 64 * 1024  # of a WAV file, before its samples
BEFORE_CHUNKS = 12  # "RIFF", size, "WAVE"


class SoundMeter:
    """Owns the counts of one sound. `pcm_bytes_per_s` of a sound that is raw PCM if it has no WAV header; None: it is not."""

    def __init__(self, pcm_bytes_per_s: int | None = None) -> None:
        self._bytes_per_s = pcm_bytes_per_s
        self._head: bytearray | None = bytearray()  # until samples begin; None: they have begun
        self._declared: int | None = None  # bytes of samples, as a WAV header says
        self._num_bytes = 0

    def feed(self, data: bytes) -> None:
        if self._head is None:
            self._num_bytes += len(data)
            return
        self._head += data
        if not b"RIFF".startswith(bytes(self._head[:4])):
            self._begin(0)
        elif len(self._head) > BEFORE_CHUNKS:
            self._read_head(bytes(self._head))

    def finish(self) -> None:
        """No more bytes come: a beginning that never became a sound counts as bytes of an unknown format."""
        if self._head:
            self._bytes_per_s = None
            self._begin(0)

    @property
    def num_bytes(self) -> int:
        """Of sound: a header is none."""
        return self._num_bytes if not self._declared else min(self._declared, self._num_bytes)

    @property
    def seconds(self) -> float | None:
        """None: the format is not known."""
        return self.num_bytes / self._bytes_per_s if self._bytes_per_s and self._head is None else None

    def _begin(self, place: int) -> None:
        assert self._head is not None, "samples begin once"
        self._num_bytes = len(self._head) - place
        self._head = None

    def _read_head(self, head: bytes) -> None:
        """Chunks follow each other: a name of four letters, a size, the content, padded to an even length."""
        place, bytes_per_s = BEFORE_CHUNKS, None
        while place + 8 <= len(head):
            name, size = head[place : place + 4], int.from_bytes(head[place + 4 : place + 8], "little")
            if name == b"data":
                # A server that streams does not know the size yet: it writes 0 or the largest number.
                self._bytes_per_s, self._declared = bytes_per_s, size
                self._begin(place + 8)
                return
            if name == b"fmt " and place + 20 <= len(head):
                (bytes_per_s,) = struct.unpack_from("<I", head, place + 16)
            place += 8 + size + size % 2
        if len(head) > MAX_HEAD_BYTES or place > MAX_HEAD_BYTES:
            self._bytes_per_s = None
            self._begin(0)


def wav_seconds(content: bytes) -> float | None:
    """Of a whole file; None: it is no WAV file, or holds no sound."""
    meter = SoundMeter()
    meter.feed(content)
    return meter.seconds or None


def wav_file(samples: bytes, rate: int) -> bytes:
    """16-bit mono samples as a WAV file."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    data = struct.pack("<4sI", b"data", len(samples)) + samples
    return struct.pack("<4sI4s", b"RIFF", 4 + len(form) + len(data), b"WAVE") + form + data
