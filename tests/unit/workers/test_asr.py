"""Text from speech: what our own synthesizer says is heard by PocketSphinx; the adapter of Whisper with a stand-in."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.unit.workers.sounds import wav
from tonle.errors import ConfigError, InvalidRequest, ModelError
from tonle.workers.kind import Job
from tonle.workers.kinds.asr import Asr
from tonle.workers.kinds.tts import Tts
from tonle.workers.transcript import AsrOrder, AsrPiece

WORDS = ["one", "two", "three"]


def said(tts: Tts, text: str, form: str = "wav", voice: str = "alloy") -> bytes:
    (result,) = tts.run([Job({"text": text, "format": form, "voice": voice})])
    assert not isinstance(result, Exception)
    return bytes(result.media[0])


def order(data: bytes, **fields: Any) -> Job:
    return Job(msgspec.to_builtins(AsrOrder(**fields)), (memoryview(data),))


def heard(asr: Asr, job: Job) -> AsrPiece:
    (result,) = asr.run([job])
    if isinstance(result, Exception):
        raise result
    return msgspec.convert(result.fields, AsrPiece)


def text_of(piece: AsrPiece) -> str:
    return "".join(segment.text for segment in piece.segments).strip()


def test_digits_that_we_speak_are_heard(tts: Tts, asr: Asr) -> None:
    """Without a hint. eSpeak NG flutters, no two takes are the same, and one in eight is misheard."""
    assert any(text_of(heard(asr, order(said(tts, "one two three", "opus")))) == "one two three" for _ in range(3))


def test_words_have_times_and_probabilities(tts: Tts, asr: Asr) -> None:
    found = heard(asr, order(said(tts, "one two three", "mp3"), words=True, vocabulary=WORDS))
    (segment,) = found.segments
    assert [word.word for word in segment.words] == ["one", "two", "three"]
    assert found.seconds == pytest.approx(1.07, abs=0.1) and found.language == "en" and found.end
    times = [moment for word in segment.words for moment in (word.start, word.end)]
    assert times == sorted(times) and 0 <= times[0] < times[-1] <= found.seconds
    assert all(0 < (word.probability or 0) <= 1 for word in segment.words)
    assert (segment.start, segment.end) == (times[0], times[-1])
    assert segment.avg_logprob is not None and segment.avg_logprob < 0


def test_a_vocabulary_makes_other_voices_understood(tts: Tts, asr: Asr) -> None:
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "Nine"]
    data = said(tts, "one two three", voice="nova")
    assert text_of(heard(asr, order(data, vocabulary=digits))) == "one two three"
    assert asr._recognizer._decoder.current_search() == "tonle_vocabulary"  # type: ignore[attr-defined]
    heard(asr, order(wav(bytes(3200))))
    assert asr._recognizer._decoder.current_search() != "tonle_vocabulary"  # type: ignore[attr-defined]


def test_callers_do_not_change_what_others_get(tts: Tts, asr: Asr) -> None:
    data, other = said(tts, "one two three"), said(tts, "hello there", voice="shimmer")
    first = heard(asr, order(data, words=True))
    heard(asr, order(other))
    assert heard(asr, order(data, words=True)) == first


def test_utterances_come_as_they_are_found(tts: Tts, asr: Asr) -> None:
    # 1 s of silence, words, 1 s, words: 24 kHz as the synthesizer has it
    quiet = bytes(48_000)
    words = [said(tts, text, "pcm") for text in ("one two three", "three two one")]
    data = wav(quiet + words[0] + quiet + words[1] + quiet, rate=24_000)
    pieces = [msgspec.convert(result.fields, AsrPiece) for result in asr.stream(order(data, vocabulary=WORDS))]
    assert pieces[0].seconds == pytest.approx(len(data) / 48_000, abs=0.01) and not pieces[0].segments
    assert [piece.end for piece in pieces] == [False, False, False, True]
    first, second = (piece.segments[0] for piece in pieces[1:3])
    assert (first.text, second.text) == (" one two three", " three two one")
    assert 0.8 < first.start < 1.3 and first.end < 2.2 < second.start
    assert second.end < (pieces[0].seconds or 0)


def test_silence_has_no_words(asr: Asr) -> None:
    found = heard(asr, order(wav(bytes(32_000))))
    assert found.segments == [] and found.seconds == 1.0


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"language": "km"}, "language", "hears English only; serve a folder with a Whisper model"),
        ({"translate": True}, "model", "cannot translate"),
        ({"vocabulary": ["zzyzzx"]}, "vocabulary", "does not have the word 'zzyzzx'"),
        ({"vocabulary": ["a | <b>;"]}, "vocabulary", "does not have the word"),
        ({"vocabulary": []}, "vocabulary", "1 to 1000 words"),
    ],
)
def test_what_it_cannot_do_is_refused(asr: Asr, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message.replace("|", r"\|")) as error:
        heard(asr, order(wav(bytes(3200)), **fields))
    assert error.value.param == param


def test_a_bad_file_is_the_fault_of_its_job_alone(asr: Asr) -> None:
    bad, good = asr.run([order(b"nothing"), order(wav(bytes(3200)))])
    assert isinstance(bad, InvalidRequest) and not isinstance(good, Exception)
    with pytest.raises(InvalidRequest, match="longer than the 60 seconds"):
        heard(asr, order(wav(bytes(2 * 8_000 * 70), rate=8_000)))


def test_fields_without_effect_are_named(asr: Asr) -> None:
    found = heard(asr, order(wav(bytes(3200)), prompt="names", temperature=0.4))
    assert set(found.warnings) == {"prompt", "temperature"}


def test_long_speech_is_cut_and_its_times_go_on(tts: Tts, asr: Asr, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.workers.kinds.asr_pocketsphinx.MAX_UTTERANCE_S", 1.0)
    found = heard(asr, order(said(tts, "one two three one two three"), vocabulary=WORDS))
    assert len(found.segments) > 1
    starts = [segment.start for segment in found.segments]
    assert starts == sorted(starts) and 0.9 < starts[1] < 2


def test_the_warm_up_runs(asr: Asr, tts: Tts) -> None:
    for kind in (asr, tts):
        assert not any(isinstance(result, Exception) for result in kind.run(kind.warm_up()))


def test_settings_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in [({"speed": 1}, "no option speed"), ({"max_audio_s": 0}, "max_audio_s must be")]:
        with pytest.raises(ConfigError, match=message):
            Asr().load(None, "cpu", options)
    with pytest.raises(ModelError, match=r"must be a folder with model\.bin"):
        Asr().load(str(tmp_path), "cpu", {})
    (tmp_path / "model.bin").touch()
    monkeypatch.setitem(sys.modules, "faster_whisper", None)
    with pytest.raises(ModelError, match=r"pip install 'tonle\[whisper\]'"):
        Asr().load(str(tmp_path), "cpu", {})
    monkeypatch.setitem(sys.modules, "pocketsphinx", None)
    with pytest.raises(ModelError, match=r"pip install 'tonle\[speech\]'"):
        Asr().load(None, "cpu", {})


# -- a stand-in: faster-whisper cannot be loaded without weights


class _WhisperModel:
    supported_languages = ("en", "km")

    def __init__(self, path: str, **options: Any) -> None:
        self.model = types.SimpleNamespace(is_multilingual="multi" in path)
        self.options, self.calls = options, list[Any]()

    def transcribe(self, audio: Any, **asked: Any) -> tuple[Any, Any]:
        assert audio.dtype == np.float32 and np.abs(audio).max() <= 1
        self.calls.append(asked)
        word = types.SimpleNamespace(word=" ok", start=np.float64(0.1), end=0.4, probability=0.9)
        segment = types.SimpleNamespace(
            start=0.1, end=0.5, text=" ok", words=[word], tokens=[1, 2], temperature=0.2, avg_logprob=-0.1,
            compression_ratio=1.1, no_speech_prob=0.01,
        )  # fmt: skip
        return iter([segment] * 2), types.SimpleNamespace(language=asked["language"] or "km")


@pytest.mark.parametrize("folder", ["multi", "english"])
def test_whisper_is_called_as_its_package_wants(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faster_whisper", types.SimpleNamespace(WhisperModel=_WhisperModel))
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "model.bin").touch()
    asr = Asr()
    asr.load(str(tmp_path / folder), "cuda:1", {"compute_type": "int8", "beam_size": 2})
    model: Any = asr._recognizer._model  # type: ignore[attr-defined]
    assert model.options == {"device": "cuda", "device_index": 1, "compute_type": "int8", "local_files_only": True}
    data = wav(bytes(16_000))
    found = heard(asr, order(data, prompt="names", words=True, temperature=0.3, vocabulary=["a", "b"]))
    assert text_of(found) == "ok ok" and found.language == "km" and found.segments[0].words[0].word == "ok"
    assert model.calls[0] == {
        "language": None, "task": "transcribe", "beam_size": 2, "initial_prompt": "names", "hotwords": "a b",
        "word_timestamps": True, "temperature": 0.3,
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match="does not know the language 'xx'"):
        heard(asr, order(data, language="xx"))
    if folder == "multi":
        heard(asr, order(data, translate=True))
        assert model.calls[-1]["task"] == "translate" and "temperature" not in model.calls[-1]
    else:
        with pytest.raises(InvalidRequest, match="cannot translate"):
            heard(asr, order(data, translate=True))
