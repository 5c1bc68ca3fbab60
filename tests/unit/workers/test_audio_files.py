"""Sound in and out: rates, formats, bad files in bounded memory, streams of pieces."""

from __future__ import annotations

import resource
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.workers.sounds import encoded, soundfile, tone, wav
from tonle.errors import InvalidRequest
from tonle.workers.kinds import read_audio as reading
from tonle.workers.kinds.read_audio import read_audio
from tonle.workers.kinds.resample import Resampler
from tonle.workers.kinds.stretch import stretch
from tonle.workers.kinds.write_audio import AudioWriter
from tonle.workers.speech_order import AudioFormat

SEEDS = [("WAV", None), ("FLAC", None), ("MP3", None), ("OGG", "OPUS"), ("OGG", "VORBIS")]
NUMBERS = struct.pack("<4f", 0.1, float("nan"), float("inf"), 0.2)


@pytest.mark.parametrize(
    ("rate", "to"), [(44_100, 16_000), (8_000, 16_000), (22_050, 24_000), (96_000, 16_000), (12_345, 16_000)]
)
def test_a_tone_is_the_same_at_another_rate(rate: int, to: int) -> None:
    resampler = Resampler(rate, to)
    blocks = np.array_split(tone(1, rate), 7)
    made = np.concatenate([*(resampler.push(block) for block in blocks), resampler.finish()])
    assert abs(len(made) - to) <= 1
    assert np.abs(made[200:-200] - tone(1, to)[200 : len(made) - 200]).max() < 0.003
    whole = Resampler(rate, to)
    assert np.allclose(np.concatenate((whole.push(tone(1, rate)), whole.finish())), made, atol=1e-6)


def test_what_the_new_rate_cannot_hold_is_filtered_out() -> None:
    resampler = Resampler(48_000, 16_000)
    made = np.concatenate((resampler.push(tone(1, 48_000, hz=9_500)), resampler.finish()))
    assert np.abs(made[200:-200]).max() < 0.001


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.3])
def test_stretched_speech_is_longer_and_no_lower(factor: float) -> None:
    made = stretch(tone(1, 16_000), factor, 16_000)
    assert len(made) / 16_000 == pytest.approx(factor, rel=0.05)
    pitch = np.abs(np.fft.rfft(made)).argmax() * 16_000 / len(made)
    assert pitch == pytest.approx(440, rel=0.03)


@pytest.mark.parametrize(
    ("container", "subtype", "rate"),
    [("WAV", "PCM_16", 44_100), ("WAV", "FLOAT", 8_000), ("WAV", "ULAW", 8_000), ("FLAC", "PCM_24", 48_000),
     ("MP3", None, 44_100), ("OGG", "OPUS", 48_000), ("OGG", "VORBIS", 22_050), ("AIFF", None, 16_000)],
)  # fmt: skip
def test_formats_that_are_read(container: str, subtype: str | None, rate: int) -> None:
    stereo = np.stack((tone(1.5, rate), tone(1.5, rate)), axis=1)
    pcm = read_audio(memoryview(encoded(stereo, rate, container, subtype)))
    assert len(pcm) / 16_000 == pytest.approx(1.5, abs=0.06)
    spectrum = np.abs(np.fft.rfft(pcm[:16_000]))
    assert spectrum.argmax() == pytest.approx(440, abs=2)
    assert np.abs(pcm[2000:-2000]).max() / 32768 == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"this is not sound" * 50, "cannot be decoded"),
        (bytes(5000), "cannot be decoded"),
        (b"\xff\xfb" + bytes(300), "cannot be decoded"),
        (b"RIFF", "cannot be decoded"),
        (b"OggS" + bytes(100), "cut off"),
        (wav(b""), "no sound in it"),
        (wav(bytes(2000), claimed=4000), "cut off: 4000 bytes of sound are announced, 2000"),
        (wav(bytes(2000), claimed=1_900_000_000), "cut off"),
        (wav(bytes(2000), rate=1), "1 channels at 1 Hz"),
        (wav(bytes(2000), rate=2**31 - 1), "at 2147483647 Hz"),
        (wav(bytes(64_000), channels=500), "500 channels"),
        (wav(NUMBERS * 100, code=3, bits=32), "not numbers"),
        (b"\x1aE\xdf\xa3" + bytes(100), "webm"),
        (bytes(4) + b"ftypM4A " + bytes(100), "m4a"),
    ],
)
def test_bad_files_are_refused(data: bytes, message: str) -> None:
    soundfile()
    with pytest.raises(InvalidRequest, match=message) as error:
        read_audio(memoryview(data))
    assert error.value.param == "file"


@pytest.mark.parametrize(("container", "subtype"), SEEDS)
def test_files_that_were_cut_off_are_refused(container: str, subtype: str | None) -> None:
    data = encoded(tone(3, 24_000), 24_000, container, subtype)
    for share in (0.6, 0.1, 0.01):
        with pytest.raises(InvalidRequest, match=r"cut off|cannot be decoded"):
            read_audio(memoryview(data[: int(len(data) * share)]))


def test_a_stream_that_claims_four_gigabytes_is_read_as_far_as_it_goes() -> None:
    soundfile()
    assert len(read_audio(memoryview(wav(bytes(32_000), claimed=0xFFFF_FFFF)))) == 16_000


def test_an_hour_that_compresses_well_costs_no_memory() -> None:
    soundfile()
    hour = encoded(np.zeros(8_000 * 3600, np.int8).astype(np.int16), 8_000, "FLAC")
    unknown = bytearray(hour)
    unknown[21] &= 0xF0  # the number of samples: 36 bits from here
    unknown[22:26] = bytes(4)
    assert len(hour) < 300_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in (hour, bytes(unknown)):
        with pytest.raises(InvalidRequest, match="longer than the 20 seconds"):
            read_audio(memoryview(data), max_s=20)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 50_000 * (1024 if sys.platform == "darwin" else 1)


def test_flac_of_unknown_length_is_read_to_its_end() -> None:
    data = bytearray(encoded(tone(3, 24_000), 24_000, "FLAC"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    assert len(read_audio(memoryview(bytes(data)))) / 16_000 == pytest.approx(3, abs=0.01)


def test_mp3_of_varying_rate_without_a_length_is_read_to_its_end() -> None:
    loud_then_quiet = np.concatenate((np.random.default_rng(1).normal(0, 0.3, 24_000), np.zeros(24_000 * 5)))
    data = encoded(loud_then_quiet, 24_000, "MP3")
    assert b"Xing" in data[:60]
    bare = data[data.find(data[:2], 4) :]  # without the first frame, which has the length
    assert len(read_audio(memoryview(bare))) / 16_000 == pytest.approx(6, abs=0.1)


@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=6)), max_size=4),
       st.floats(0.01, 1))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_damaged_files_are_read_or_refused(
    seed: tuple[str, str | None], edits: list[tuple[float, bytes]], share: float
) -> None:
    data = bytearray(_sample(*seed))
    for place, patch in edits:
        at = int(place * len(data))
        data[at : at + len(patch)] = patch
    if share < 0.5:
        del data[int(2 * share * len(data)) :]
    try:
        assert 0 < len(read_audio(memoryview(bytes(data)), max_s=30)) <= 31 * 16_000
    except InvalidRequest as error:
        assert error.param == "file" and len(error.message) < 300


_samples: dict[tuple[str, str | None], bytes] = {}


def _sample(container: str, subtype: str | None) -> bytes:
    if (container, subtype) not in _samples:
        _samples[container, subtype] = encoded(tone(0.5, 24_000), 24_000, container, subtype)
    return _samples[container, subtype]


@pytest.mark.parametrize("kind", ["mp3", "opus", "flac", "wav"])
@pytest.mark.parametrize("num_pieces", [1, 4])
def test_what_is_written_in_pieces_can_be_read(kind: AudioFormat, num_pieces: int) -> None:
    soundfile()
    writer = AudioWriter(kind, 22_050)
    pieces = np.array_split(tone(4, 22_050), num_pieces)
    sent = [writer.push(piece, last=number == num_pieces) for number, piece in enumerate(pieces, 1)]
    assert writer.seconds == pytest.approx(4, abs=0.001)
    if num_pieces > 1:
        assert all(sent) if kind != "flac" else not any(sent[:-1])  # its header needs the length
    pcm = read_audio(memoryview(b"".join(sent)))
    assert len(pcm) / 16_000 == pytest.approx(4, abs=0.1)
    assert np.abs(np.fft.rfft(pcm[8_000:24_000])).argmax() == pytest.approx(440, abs=2)


def test_plain_samples_are_24_khz_and_wav_headers_say_what_they_can() -> None:
    pcm = AudioWriter("pcm", 24_000).push(tone(1, 24_000), last=True)
    assert np.frombuffer(pcm, "<i2")[100] == int(tone(1, 24_000)[100] * 32767)
    whole = AudioWriter("wav", 24_000).push(tone(1, 24_000), last=True)
    assert whole[40:44] == struct.pack("<I", 48_000) and whole[44:] == pcm
    begun = AudioWriter("wav", 24_000).push(tone(1, 24_000), last=False)
    assert begun[4:8] == begun[40:44] == b"\xff" * 4


def test_webm_and_m4a_need_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InvalidRequest, match=r"cannot decode webm; send wav.*pip install av"):
        read_audio(memoryview(b"\x1aE\xdf\xa3" + bytes(100)))


def test_without_soundfile_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(Exception, match=r"pip install 'tonle\[speech\]'"):
        read_audio(memoryview(wav(bytes(100))))
    with pytest.raises(Exception, match=r"pip install 'tonle\[speech\]'"):
        AudioWriter("mp3", 24_000)
    assert reading.NEEDS_SOUNDFILE and AudioWriter("wav", 24_000).push(tone(0.1, 24_000), last=True)
