"""Speech from text with eSpeak NG; the adapters of neural voices with small or stand-in models."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tonle.errors import ConfigError, InvalidRequest, ModelError
from tonle.workers.kind import Job
from tonle.workers.kinds import tts_espeak
from tonle.workers.kinds.tts import Tts
from tonle.workers.kinds.voices import OPENAI_VOICES
from tonle.workers.speech_order import TtsOrder, TtsPiece


def job(text: str, **fields: Any) -> Job:
    return Job(msgspec.to_builtins(TtsOrder(text, **{"format": "pcm", **fields})))


def seconds(kind: Tts, text: str, **fields: Any) -> float:
    """Of what is spoken, and it is no silence."""
    (result,) = kind.run([job(text, **fields)])
    if isinstance(result, Exception):
        raise result
    samples = np.frombuffer(result.media[0], "<i2")
    assert np.abs(samples).max() > 1000
    assert msgspec.convert(result.fields, TtsPiece) == TtsPiece(seconds=len(samples) / 24_000, end=True)
    return len(samples) / 24_000


def test_every_voice_speaks_and_sounds_different(tts: Tts) -> None:
    spoken = [
        tts.run([job("hello", voice=voice)])[0] for voice in [*OPENAI_VOICES, "en-us", "fr+f2", "klatt2", "Michael"]
    ]
    assert len({result.media[0].tobytes() if isinstance(result.media[0], memoryview) else bytes(result.media[0])
                for result in spoken if not isinstance(result, Exception)}) == len(spoken)  # fmt: skip


def test_sentences_come_one_by_one(tts: Tts) -> None:
    pieces = [msgspec.convert(result.fields, TtsPiece) for result in tts.stream(job("One. Two! Three?"))]
    assert [piece.end for piece in pieces] == [False, False, True]
    assert 0 < pieces[0].seconds < pieces[1].seconds < pieces[2].seconds


@pytest.mark.parametrize("speed", [0.25, 0.5, 2.0, 4.0])
def test_speed_is_kept(tts: Tts, speed: float) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    assert seconds(tts, text, speed=speed) * speed == pytest.approx(seconds(tts, text), rel=0.2)


def test_khmer_is_spoken_by_its_letters_or_by_name(tts: Tts) -> None:
    assert "km" in tts.describe()["languages"]
    alone = seconds(tts, "សួស្តី")
    assert 0.3 < alone < 2  # and not the names of its letters
    assert seconds(tts, "សួស្តី", voice="km") == seconds(tts, "សួស្តី", language="km") == alone
    assert seconds(tts, "សួស្តី hello") > alone


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"text": "  \n"}, "input", "nothing that can be spoken"),
        ({"text": "x" * 4097}, "input", "4097 characters; at most 4096"),
        ({"text": "x", "speed": 0.2}, "speed", "from 0.25 to 4"),
        ({"text": "x", "speed": float("nan")}, "speed", "from 0.25 to 4"),
        ({"text": "x", "voice": "nobody"}, "voice", "there is no voice 'nobody'; use one of alloy"),
        ({"text": "x", "voice": "en-us+nobody"}, "voice", "there is no voice"),
        ({"text": "x", "voice": "../../etc"}, "voice", "there is no voice"),
        ({"text": "x", "language": "xx"}, "language", "does not speak 'xx'"),
    ],
)
def test_what_cannot_be_spoken_is_refused(tts: Tts, fields: dict[str, Any], param: str, message: str) -> None:
    (result,) = tts.run([job(**fields)])
    assert isinstance(result, InvalidRequest) and result.param == param and message in result.message
    with pytest.raises(InvalidRequest):
        next(tts.stream(job(**fields)))


def test_settings_are_checked(tmp_path: Path) -> None:
    for options, message in [({"volume": 1}, "no option volume"), ({"max_input_chars": 0}, "max_input_chars must be")]:
        with pytest.raises(ConfigError, match=message):
            Tts().load(None, "cpu", options)
    with pytest.raises(ModelError, match="is no voice"):
        Tts().load(str(tmp_path), "cpu", {})


def test_without_espeak_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'tonle\[speech\]'"):
        tts_espeak._library()


def test_a_vits_voice_speaks(tmp_path: Path) -> None:
    """The real library with a tiny model of random weights."""
    folder = _tiny_vits(tmp_path / "mms-tts-khm")
    kind = Tts()
    kind.load(str(folder), "cpu", {})
    assert kind.describe()["synthesizer"] == "vits" and kind.describe()["languages"] == ["khm"]
    slow, fast = (_vits_seconds(kind, speed) for speed in (0.5, 2.0))
    assert slow > fast > 0
    refused = kind.run([job("កខ", voice="other"), job("កខ", language="fr")])
    assert [error.param for error in refused if isinstance(error, InvalidRequest)] == ["voice", "language"]


def _vits_seconds(kind: Tts, speed: float) -> float:
    (result,) = kind.run([job("កខគ កខគ", speed=speed, language="km")])
    assert not isinstance(result, Exception)
    return float(result.fields["seconds"])


def _tiny_vits(folder: Path) -> Path:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'tonle[hf]'")
    import torch
    from transformers import VitsConfig, VitsModel, VitsTokenizer

    torch.manual_seed(1)
    folder.mkdir()
    letters = {"<pad>": 0, "ក": 1, "ខ": 2, "គ": 3, " ": 4, "<unk>": 5}
    (folder / "vocab.json").write_bytes(msgspec.json.encode(letters))
    tokenizer = VitsTokenizer(str(folder / "vocab.json"), language="khm", phonemize=False, is_uroman=False)
    tokenizer.save_pretrained(folder)
    config = VitsConfig(
        vocab_size=len(letters), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, flow_size=16,
        spectrogram_bins=9, posterior_encoder_num_wavenet_layers=2, prior_encoder_num_flows=2, prior_encoder_num_wavenet_layers=2,
        upsample_initial_channel=16, upsample_rates=[8, 8], upsample_kernel_sizes=[16, 16], resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1]], duration_predictor_num_flows=2, duration_predictor_filter_channels=16,
        depth_separable_num_layers=2, sampling_rate=16_000,
    )  # fmt: skip
    VitsModel(config).save_pretrained(folder)
    return folder


# -- stand-ins: Piper and Kokoro cannot be loaded without their weights


def test_piper_is_called_as_its_package_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class PiperVoice:
        config = types.SimpleNamespace(sample_rate=22_050, espeak_voice="en-us", speaker_id_map={"ann": 3, "bob": 4})

        @staticmethod
        def load(path: str, use_cuda: bool) -> PiperVoice:
            asked.append((path, use_cuda))
            return PiperVoice()

        def synthesize(self, text: str, syn_config: Any) -> list[Any]:
            asked.append((text, syn_config.speaker_id, syn_config.length_scale))
            return [types.SimpleNamespace(audio_float_array=np.full(11_025, 0.1, np.float32))] * 2

    module = types.SimpleNamespace(PiperVoice=PiperVoice, SynthesisConfig=types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, "piper", module)
    (tmp_path / "v.onnx").touch()
    (tmp_path / "v.onnx.json").write_text("{}")
    kind = Tts()
    kind.load(str(tmp_path / "v.onnx"), "cpu", {})
    assert seconds(kind, "Hi.", voice="bob", speed=2) == pytest.approx(1.0, abs=0.001)
    assert asked == [(str(tmp_path / "v.onnx"), False), ("Hi.", 4, 0.5)]
    (refused,) = kind.run([job("x", language="fr")])
    assert isinstance(refused, InvalidRequest) and "speaks en-us only" in refused.message


def test_kokoro_is_called_as_its_package_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Kokoro:
        def __init__(self, model: str, voices: str) -> None:
            asked.append((Path(model).name, Path(voices).name))

        def get_voices(self) -> list[str]:
            return ["bm_daniel", "af_nova"]

        def create(self, text: str, *, voice: str, speed: float, lang: str) -> tuple[Any, int]:
            asked.append((text, voice, speed, lang))
            return np.sin(np.arange(24_000) / 9).astype(np.float32), 24_000

    monkeypatch.setitem(sys.modules, "kokoro_onnx", types.SimpleNamespace(Kokoro=Kokoro))
    (tmp_path / "kokoro-v1.0.onnx").touch()
    (tmp_path / "voices-v1.0.bin").touch()
    kind = Tts()
    kind.load(str(tmp_path), "cpu", {})
    assert seconds(kind, "Hi.", voice="nova") == pytest.approx(1, abs=0.01)
    assert seconds(kind, "Hi.", voice="bm_daniel", speed=0.25) == pytest.approx(
        2, rel=0.1
    )  # twice what was made at 0.5
    assert asked[1:] == [("Hi.", "af_nova", 1.0, "en-us"), ("Hi.", "bm_daniel", 0.5, "en-gb")]
    assert isinstance(kind.run([job("x", voice="zoe")])[0], InvalidRequest)
