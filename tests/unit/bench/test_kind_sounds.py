"""Lengths of sounds from their bytes, folders of WAV files, forms."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path

import pytest

from tests.unit.bench.kind_server import form_of
from tests.unit.bench.scripted import Asked
from tonle.bench.kinds.form import encode_form
from tonle.bench.kinds.sounds import MadeSounds, WavFiles
from tonle.bench.kinds.wav import SoundMeter, wav_file, wav_seconds
from tonle.bench.options import Pause
from tonle.errors import ConfigError


def written(frames: int, *, rate: int, channels: int, width: int) -> bytes:
    """By the standard library."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(bytes(frames * channels * width))
    return out.getvalue()


@pytest.mark.parametrize(("rate", "channels", "width"), [(16_000, 1, 2), (44_100, 2, 2), (8_000, 1, 1), (48_000, 2, 3)])
@pytest.mark.parametrize("step", [1, 13, 100_000])
def test_a_wav_file_is_measured_however_it_is_cut(rate: int, channels: int, width: int, step: int) -> None:
    content = written(1234, rate=rate, channels=channels, width=width)
    meter = SoundMeter()
    for begin in range(0, len(content), step):
        meter.feed(content[begin : begin + step])
        if begin + step <= 44:
            assert meter.num_bytes == 0, "a header is no sound"
    meter.finish()
    assert meter.seconds == pytest.approx(1234 / rate)


@pytest.mark.parametrize("declared", [0, 0xFFFFFFFF, 0x7FFFFFFF])
def test_a_stream_whose_header_cannot_know_its_length(declared: int) -> None:
    content = bytearray(wav_file(bytes(32_000), 16_000))
    content[40:44] = struct.pack("<I", declared)
    assert wav_seconds(bytes(content)) == pytest.approx(1.0)


def test_what_follows_the_samples_is_no_sound() -> None:
    listed = wav_file(bytes(32_000), 16_000) + b"LIST" + struct.pack("<I", 500) + bytes(500)
    assert wav_seconds(listed) == pytest.approx(1.0)


def test_chunks_before_the_samples_are_passed_over() -> None:
    plain = wav_file(bytes(3_200), 16_000)
    other = b"LIST" + struct.pack("<I", 5) + bytes(6)  # padded to an even length
    assert wav_seconds(plain[:12] + other + plain[12:]) == pytest.approx(0.1)


@pytest.mark.parametrize("content", [b"", b"RI", b"RIFF1234WAVE", b"ID3 and so on", b"RIFF1234WAVE" + bytes(200_000)])
def test_what_is_no_wav_file_has_no_length(content: bytes) -> None:
    assert wav_seconds(content) is None
    meter = SoundMeter(48_000)
    meter.feed(content)
    meter.finish()
    assert meter.num_bytes == len(content)


def test_made_sounds_are_readable_and_the_same_for_a_seed() -> None:
    sounds = MadeSounds(Pause(0.3, 2.0), seed=5)
    first = sounds.read(0)
    with wave.open(io.BytesIO(first.content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        assert file.getnframes() / 16_000 == first.seconds
        assert len(set(file.readframes(-1))) > 16, "not silence alone"
    assert MadeSounds(Pause(0.3, 2.0), seed=5).read(0) == first
    assert sounds.read(1) != first != MadeSounds(Pause(0.3, 2.0), seed=6).read(0)
    assert len(MadeSounds(Pause(1.0, 3600.0), seed=0)) == 1, "long ones are few: they are kept in memory"


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        WavFiles(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"no \.wav files"):
        WavFiles(tmp_path)
    (tmp_path / "a.wav").write_bytes(b"not a sound")
    with pytest.raises(ConfigError, match=r"a\.wav is no WAV file"):
        WavFiles(tmp_path).read(0)
    monkeypatch.setattr("tonle.bench.kinds.sounds.MAX_BYTES", 4)
    with pytest.raises(ConfigError, match="kept in memory"):
        WavFiles(tmp_path)


def test_a_form_is_read_back_by_another_implementation() -> None:
    file = bytes(range(256)) + b"\r\n--\r\n"
    fields = {"model": "w", "temperature": 0, "stream": False, "timestamp_granularities[]": ["word", "segment"]}
    body, content_type = encode_form(fields, file=file, filename='a "b".wav', content_type="audio/wav")
    found = form_of(Asked(0, "POST", "/", {"content-type": content_type}, {}, body))
    assert found["file"] == file
    assert (found["model"], found["temperature"], found["stream"]) == (b"w", b"0", b"false")
    assert body.count(b'name="timestamp_granularities[]"') == 2
    assert b'filename="a %22b%22.wav"' in body
