"""Transcripts as text, subtitles and JSON, and forms that are read or refused."""

from __future__ import annotations

import json

import pytest

from tonle.errors import InvalidRequest
from tonle.protocol.multipart import parse_form
from tonle.workers.endpoints.transcript_formats import Transcript, TranscriptFormat, written
from tonle.workers.endpoints.transcriptions import Asked, read_form
from tonle.workers.transcript import AsrOrder, Segment, Word

FOUND = Transcript(
    "transcribe", "en", 3725.5,
    [Segment(0.5, 1.25, " one two", words=[Word("one", 0.5, 0.8, 0.9), Word("two", 0.9, 1.25)], avg_logprob=-0.2),
     Segment(3661.001, 3662, " a --> b\n\nc")],
    {"prompt": "has no effect"},
)  # fmt: skip


def form(*fields: tuple[str, str], file: bytes | None = b"x") -> Asked:
    parts = [
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields
    ]
    if file is not None:
        parts.append(b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + file + b"\r\n")
    return read_form(parse_form(b"".join(parts) + b"--b--", "multipart/form-data; boundary=b"), translate=False)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("text", "one two a --> b\n\nc\n"),
        ("srt", "1\n00:00:00,500 --> 00:00:01,250\none two\n\n2\n01:01:01,001 --> 01:01:02,000\na → b c\n\n"),
        ("vtt", "WEBVTT\n\n00:00:00.500 --> 00:00:01.250\none two\n\n01:01:01.001 --> 01:01:02.000\na → b c\n\n"),
    ],
)
def test_text_and_subtitles(kind: TranscriptFormat, text: str) -> None:
    assert written(FOUND, kind, set()).decode() == text


def test_json_with_and_without_words() -> None:
    short = json.loads(written(FOUND, "json", {"segment"}))
    assert short["text"].startswith("one two") and short["usage"] == {"type": "duration", "seconds": 3725.5}
    assert short["warnings"] == [{"param": "prompt", "message": "has no effect"}] and "segments" not in short
    verbose = json.loads(written(FOUND, "verbose_json", {"segment"}))
    assert (verbose["task"], verbose["language"], verbose["duration"]) == ("transcribe", "en", 3725.5)
    assert "words" not in verbose and [one["id"] for one in verbose["segments"]] == [0, 1]
    assert verbose["segments"][0]["avg_logprob"] == -0.2 and verbose["segments"][0]["no_speech_prob"] is None
    words = json.loads(written(FOUND, "verbose_json", {"word"}))
    assert "segments" not in words and words["words"][0] == {
        "word": "one",
        "start": 0.5,
        "end": 0.8,
        "probability": 0.9,
    }


def test_a_form_is_read() -> None:
    asked = form(
        ("model", "m"), ("language", "en"), ("response_format", "verbose_json"), ("temperature", "0.5"), ("prompt", ""),
        ("timestamp_granularities[]", "word"), ("timestamp_granularities[]", "segment"), ("vocabulary", "one, two\nthree"),
        ("chunking_strategy", "auto"),
    )  # fmt: skip
    assert asked.order == AsrOrder(language="en", temperature=0.5, words=True, vocabulary=["one", "two", "three"])
    assert (asked.form, asked.granularities, asked.stream) == ("verbose_json", {"word", "segment"}, False)
    assert asked.warnings == {"chunking_strategy": "has no effect"} and bytes(asked.file) == b"x"
    assert form(("stream", "True")).stream and form().form == "json"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ([("response_format", "docx")], "response_format", "must be one of json, text, srt"),
        ([("response_format", "diarized_json")], "response_format", "must be one of"),
        ([("temperature", "warm")], "temperature", "from 0 to 1"),
        ([("temperature", "nan")], "temperature", "from 0 to 1"),
        ([("stream", "maybe")], "stream", "true or false"),
        ([("stream", "true"), ("response_format", "srt")], "stream", "cannot be streamed"),
        ([("timestamp_granularities[]", "letter")], "timestamp_granularities[]", "word or segment"),
        ([("timestamp_granularities[]", "word")], "timestamp_granularities[]", "needs response_format verbose_json"),
        ([("known_speaker_names[]", "ann")], "known_speaker_names[]", "cannot be served"),
        ([("prompt", "a"), ("prompt", "b")], "prompt", "given 2 times"),
    ],
)
def test_what_is_wrong_with_a_form_is_explained(fields: list[tuple[str, str]], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        form(*fields)
    assert error.value.param == param


def test_a_form_needs_a_file() -> None:
    with pytest.raises(InvalidRequest, match="file is missing"):
        form(("model", "m"), file=None)
    with pytest.raises(InvalidRequest, match="file must be a file"):
        form(("file", "text"), file=None)
