"""`read_audio`: a file of sound from a caller to mono samples of 16 bits at 16 kHz, within bounds.

Does: decode wav, flac, mp3, ogg (Vorbis, Opus) and others with libsndfile, webm and m4a with PyAV if it is installed; block by
block, so that memory is bounded by the seconds that are allowed. Does not: trust a header.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tonle.errors import ConfigError, InvalidRequest
from tonle.workers.kinds.resample import Resampler, Samples

SAMPLE_RATE = 16_000
MAX_AUDIO_S = 3600.0  # of one file: 115 MB as samples. The option max_audio_s of a pool
MAX_CHANNELS = 8
MIN_RATE, MAX_RATE = 4_000, 384_000
_BLOCK_FRAMES = 65_536
_TAG_BYTES = 128  # mp3 files may end with a tag of this size, and it is looked for first
_MISSING_S = 0.1  # so much less than the header says is rounding

Pcm = npt.NDArray[np.int16]  # shape (n,)

PLAYABLE = "send wav, flac, mp3 or ogg (Opus or Vorbis)"
NEEDS_SOUNDFILE = "reading and writing sound needs the package soundfile: pip install 'tonle[speech]'"


def read_audio(data: memoryview, *, max_s: float = MAX_AUDIO_S) -> Pcm:
    """Raises `InvalidRequest`, or `ConfigError` if nothing is installed that decodes."""
    if not len(data):
        raise InvalidRequest(f"the file is empty; {PLAYABLE}", param="file")
    _check_length(data)
    begin = bytes(data[:12])
    if begin[:4] == b"\x1aE\xdf\xa3":
        blocks = _by_av(data, "matroska", "webm")
    elif begin[4:8] == b"ftyp":
        blocks = _by_av(data, "mov", "m4a or mp4")
    else:
        blocks = _by_soundfile(data, max_s)
    return _collected(blocks, max_s)


def _collected(blocks: Iterator[tuple[int, Samples]], max_s: float) -> Pcm:
    """`blocks`: rate, and mono samples."""
    resampler: Resampler | None = None
    pieces: list[Pcm] = []
    left = int(max_s * SAMPLE_RATE)
    for rate, block in blocks:
        if not np.isfinite(block).all():
            raise InvalidRequest("the file has samples that are not numbers (NaN or infinite)", param="file")
        resampler = resampler or Resampler(rate, SAMPLE_RATE)
        pieces.append(_pcm(resampler.push(block)))
        left -= len(pieces[-1])
        if left < 0:
            raise _too_long(max_s)
    if resampler is not None:
        pieces.append(_pcm(resampler.finish()))
    found = np.concatenate(pieces) if pieces else np.empty(0, np.int16)
    if not len(found):
        raise InvalidRequest("the file has no sound in it: 0 seconds", param="file")
    return found


def _too_long(max_s: float) -> InvalidRequest:
    return InvalidRequest(
        f"the file is longer than the {max_s:g} seconds that this server takes; send it in parts", param="file"
    )


def _pcm(samples: Samples) -> Pcm:
    return (np.clip(samples, -1, 1) * 32767).astype(np.int16)


# -- libsndfile


def _by_soundfile(data: memoryview, max_s: float) -> Iterator[tuple[int, Samples]]:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the package without its library
        raise ConfigError(f"{NEEDS_SOUNDFILE} ({error})") from None
    try:
        with soundfile.SoundFile(ViewFile(data, seeming=_seeming_size(data))) as file:
            rate, claimed = file.samplerate, file.frames
            if not (MIN_RATE <= rate <= MAX_RATE and 1 <= file.channels <= MAX_CHANNELS):
                raise InvalidRequest(
                    f"the file has {file.channels} channels at {rate} Hz; "
                    f"at most {MAX_CHANNELS} at {MIN_RATE} to {MAX_RATE} Hz can be read",
                    param="file",
                )
            known = (claimed < 2**40 and file.format != "MP3") or _has_xing(data)
            if known and claimed > (max_s + 1) * rate:
                raise _too_long(max_s)
            frames = 0
            for block in _blocks(file, ends=claimed < 2**40):
                frames += len(block)
                yield rate, block.mean(axis=1)
            if known and frames < claimed - _MISSING_S * rate:
                raise InvalidRequest(
                    f"the file is cut off: {claimed / rate:.1f} seconds are announced, {frames / rate:.1f} are there",
                    param="file",
                )
    except soundfile.SoundFileError as error:
        why = str(error).rpartition(": ")[2].strip(" .") or "damaged"
        raise InvalidRequest(f"the file cannot be decoded ({why}); {PLAYABLE}", param="file") from None


def _blocks(file: Any, *, ends: bool) -> Iterator[npt.NDArray[np.float32]]:
    """Shape (frames, channels). `ends` False: the header does not say where, and libsndfile calls the end an error."""
    import soundfile

    out = np.empty((_BLOCK_FRAMES, file.channels), np.float32)
    while True:
        out.fill(np.nan)
        try:
            num = len(file.read(out=out))
        except soundfile.SoundFileError:
            if ends:
                raise
            num = int(np.isfinite(out[:, 0]).sum())  # what it had written before
            yield out[:num]
            return
        if not num:
            return
        yield out[:num]


def _has_xing(data: memoryview) -> bool:
    """An mp3 that says how many frames it has, behind tags if there are any."""
    begin = bytes(data[:10])
    skip = 0
    if begin[:3] == b"ID3" and len(begin) == 10:
        for byte in begin[6:10]:
            skip = skip << 7 | byte & 0x7F
        skip += 10
    first = bytes(data[skip : skip + 200])
    return b"Xing" in first or b"Info" in first


def _seeming_size(data: memoryview) -> int:
    """libsndfile reads as much of an mp3 as it expects from its size and its first frame; the others may have lower rates."""
    is_mp3 = bytes(data[:3]) == b"ID3" or (data[0] == 0xFF and data[1:2].tobytes() >= b"\xe0")
    return len(data) * (1 if not is_mp3 or _has_xing(data) else 40)


def _check_length(data: memoryview) -> None:
    """Raises `InvalidRequest` if the end of the file is missing, where libsndfile would read what is there."""
    if bytes(data[:4]) == b"RIFF" and bytes(data[8:12]) == b"WAVE":
        at = 12
        for _ in range(1000):
            if at + 8 > len(data):
                return
            name, size = struct.unpack_from("<4sI", data, at)
            at += 8
            if name == b"data":
                # A stream whose length was not known when it began has the largest sizes; what is there is read.
                if len(data) - at < size < 0x7FFF_FF00:
                    raise InvalidRequest(
                        f"the file is cut off: {size} bytes of sound are announced, {len(data) - at} are there",
                        param="file",
                    )
                return
            at += size + size % 2
    elif bytes(data[:4]) == b"OggS":
        tail = bytes(data[-(65_307 + 27) :])  # a page is no longer
        page = tail.rfind(b"OggS")
        sizes = tail[page + 27 : page + 27 + tail[page + 26]] if page >= 0 and page + 27 <= len(tail) else b""
        # 4: the last page of the stream.
        if not sizes or not tail[page + 5] & 4 or page + 27 + len(sizes) + sum(sizes) > len(tail):
            raise InvalidRequest("the file is cut off: its last Ogg page is missing or not whole", param="file")


class ViewFile:
    """A view of bytes as a file to read, without a copy."""

    def __init__(self, data: memoryview, *, seeming: int | None = None) -> None:
        """`seeming`: the size to tell who asks for the end."""
        self._data = data.cast("B")
        self._at = 0
        self._end = len(self._data) if seeming is None else seeming

    def readinto(self, out: Any) -> int:
        room = memoryview(out).cast("B")
        piece = self._data[self._at : self._at + len(room)]
        if self._at >= max(len(self._data), self._end - _TAG_BYTES):  # no tag at the seeming end
            piece = memoryview(bytes(min(len(room), max(0, self._end - self._at))))
        room[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def read(self, size: int = -1) -> bytes:
        end = len(self._data) if size < 0 else self._at + size
        piece = bytes(self._data[self._at : end])
        self._at += len(piece)
        return piece

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end}[whence]
        self._at = max(0, base + to)
        return self._at

    def tell(self) -> int:
        return self._at


# -- PyAV


def _by_av(data: memoryview, container: str, name: str) -> Iterator[tuple[int, Samples]]:
    """The container is given by name: one that refers to other files is never tried."""
    try:
        import av
    except ImportError:
        raise InvalidRequest(
            f"this server cannot decode {name}; {PLAYABLE}, or install PyAV on the server: pip install av", param="file"
        ) from None
    try:
        with av.open(ViewFile(data), format=container, mode="r", metadata_errors="ignore") as file:
            if not file.streams.audio:
                raise InvalidRequest("the file has no sound in it", param="file")
            to_mono = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
            for frame in file.decode(audio=0):
                for made in to_mono.resample(frame):
                    yield SAMPLE_RATE, made.to_ndarray().reshape(-1)
            for made in to_mono.resample(None):
                yield SAMPLE_RATE, made.to_ndarray().reshape(-1)
    except av.FFmpegError as error:
        raise InvalidRequest(
            f"the file cannot be decoded as {name} ({error.strerror}); {PLAYABLE}", param="file"
        ) from None
