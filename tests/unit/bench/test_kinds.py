"""Whole benchmarks of requests that are no chats, against the scripted server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench.kind_server import SPEECH_RATE, SPEECH_S, TOKENS, form_of, kinds, sound_steps
from tests.unit.bench.scripted import Behaviour, ScriptedServer, json_reply, serving
from tonle.bench import BenchOptions, BenchReport, Span, run_bench
from tonle.bench.client import JobSeries
from tonle.bench.kinds.metrics import METRICS, RequestKind
from tonle.bench.kinds.wav import wav_file, wav_seconds
from tonle.bench.measure import LevelReport
from tonle.bench.options import Pause
from tonle.bench.workload import Job
from tonle.errors import ConfigError


def measure(
    kind: RequestKind, behaviour: Behaviour | None = None, **options: Any
) -> tuple[BenchReport, ScriptedServer]:
    fields: dict[str, Any] = {"kind": kind, "requests": 4, "warmup": 1} | options
    with serving(behaviour or kinds()) as server:
        return run_bench(BenchOptions(url=server.url, **fields)), server


def only(report: BenchReport) -> LevelReport:
    assert report.ok, report.levels
    [level] = report.levels
    return level


def bodies(server: ScriptedServer) -> list[dict[str, Any]]:
    """Of what was measured, without probe and warm-up."""
    return [asked.body for asked in server.asked if asked.method == "POST"][2:]


def test_embeddings() -> None:
    report, server = measure("embeddings", items=Span(3, 5))
    level = only(report)
    counts = [len(body["input"]) for body in bodies(server)]
    assert len(counts) == 4 and set(counts) <= {3, 4, 5}
    assert (level.items, level.prompt_tokens) == (sum(counts), TOKENS * sum(counts))
    assert level.items_per_s == pytest.approx(sum(counts) / level.duration_s)
    assert level.total_tokens_per_s == pytest.approx(TOKENS * sum(counts) / level.duration_s)
    assert level.ttft_ms is None and level.e2el_ms is not None
    assert report.request_kind == "embeddings" and report.prompt_kind == "sentences"
    assert level.rows is not None and [row.items for row in level.rows] == counts
    texts = [text for body in bodies(server) for text in body["input"]]
    assert len(set(texts)) == len(texts)
    assert len({len(text) for text in texts}) > 3, "lengths are mixed"


def test_rerank_counts_documents_also_those_that_top_n_leaves_out() -> None:
    report, server = measure("rerank", items=Span(6, 6), extra_body={"top_n": 2})
    level = only(report)
    assert (level.items, level.prompt_tokens) == (24, 4 * 7 * TOKENS)
    assert all(len(body["documents"]) == 6 and body["query"] and body["top_n"] == 2 for body in bodies(server))


def test_transcriptions_of_made_up_sounds() -> None:
    report, server = measure("asr", audio_seconds=Pause(0.5, 1.5), extra_body={"language": "km", "temperature": 0.5})
    level = only(report)
    forms = [form_of(asked) for asked in server.asked if asked.method == "POST"][2:]
    seconds = [wav_seconds(form["file"]) for form in forms]
    assert all(each is not None and 0.5 <= each <= 1.5 for each in seconds) and len(set(seconds)) == 4
    assert level.audio_s == pytest.approx(sum(each or 0 for each in seconds))
    assert level.audio_s_per_s == pytest.approx((level.audio_s or 0) / level.duration_s)
    assert level.rtfx is not None and level.rtfx.count == 4
    assert {form["language"] for form in forms} == {b"km"} and {form["temperature"] for form in forms} == {b"0.5"}
    assert {form["model"] for form in forms} == {b"scripted"}
    assert any("mean nothing" in note for note in report.notes)


def test_transcriptions_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    for name, tenths in (("a.wav", 2), ("deeper/b.WAV", 4)):
        (tmp_path / name).write_bytes(wav_file(bytes(3200 * tenths), 16_000))
    (tmp_path / "notes.txt").write_text("no sound")
    report, _ = measure("asr", file=tmp_path, warmup=0, requests=6, processes=2)
    level = only(report)
    assert level.audio_s == pytest.approx(3 * 0.2 + 3 * 0.4)
    assert report.prompt_kind == "wav files"
    assert any("1 other files" in note for note in report.notes)
    assert not any("mean nothing" in note for note in report.notes)


def test_speech_is_timed_to_the_first_sample_not_to_the_header() -> None:
    level = only(measure("tts")[0])
    assert level.audio_s == pytest.approx(4 * SPEECH_S)
    assert level.ttft_ms is not None and level.e2el_ms is not None and level.rtfx is not None
    assert level.ttft_ms.min >= 10, "the header came 10 ms earlier"
    assert level.e2el_ms.min >= 20
    assert level.rtfx.max <= SPEECH_S / 0.02


@pytest.mark.parametrize(
    ("content_type", "headers", "expected"),
    [
        ("audio/pcm", "", 0.25),  # OpenAI's: 24 kHz, mono, 16 bits
        ("audio/L16; rate=48000; channels=2", "", 0.0625),
        ("audio/pcm", "X-Tonle-Audio-Seconds: 3.5\r\n", 3.5),
        ("audio/pcm", "X-Tonle-Audio-Seconds: soon\r\n", 0.25),
    ],
)
def test_the_length_of_raw_speech(content_type: str, headers: str, expected: float) -> None:
    steps = sound_steps(bytes(SPEECH_RATE // 2), content_type=content_type, headers=headers, pause_s=0.0)
    behaviour = kinds(paths={"/v1/audio/speech": lambda asked: steps})
    level = only(measure("tts", behaviour, extra_body={"response_format": "pcm"})[0])
    assert level.audio_s == pytest.approx(4 * expected)


def test_speech_of_unknown_length_has_no_real_time_factor_and_says_so() -> None:
    steps = sound_steps(b"ID3" + bytes(900), content_type="audio/mpeg", pause_s=0.0)
    report, _ = measure(
        "tts", kinds(paths={"/v1/audio/speech": lambda asked: steps}), extra_body={"response_format": "mp3"}
    )
    level = only(report)
    assert level.rtfx is None and level.audio_s is None and level.ttft_ms is not None
    assert any("unknown length" in note for note in report.notes)


def test_images() -> None:
    report, server = measure("images", items=Span(2, 2), extra_body={"size": "64x64"})
    level = only(report)
    assert level.items == 8 and level.items_per_s == pytest.approx(8 / level.duration_s)
    assert level.s_per_item is not None and level.e2el_ms is not None
    assert level.s_per_item.mean == pytest.approx(level.e2el_ms.mean / 2e3)
    assert {(body["n"], body["size"]) for body in bodies(server)} == {(2, "64x64")}


def test_the_khmer_set_and_files_of_texts(tmp_path: Path) -> None:
    report, server = measure("tts", file=Path("khmer"), sentences=Span(2, 2))
    assert report.prompt_kind == "khmer" and only(report).graphemes_per_s is None
    assert all("\u1780" <= body["input"][0] <= "\u17ff" for body in bodies(server))
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"text {place}"}) + "\n" for place in range(8)))
    report, server = measure("embeddings", file=path, items=Span(2, 2), warmup=0)
    sent = [text for asked in server.asked if asked.method == "POST" for text in asked.body["input"]]
    assert sent == [f"text {place % 8}" for place in range(10)]  # one probe, four requests
    assert any("more than once" in note for note in report.notes)


@pytest.mark.parametrize(
    ("kind", "path", "reply", "failure"),
    [
        ("embeddings", "/v1/embeddings", {"data": []}, "wrong number of embeddings: 0 instead of 1"),
        ("rerank", "/v1/rerank", {"results": [{}]}, "wrong number of results: 1 instead of 10"),
        ("images", "/v1/images/generations", {"data": [{}, {}]}, "wrong number of images: 2 instead of 1"),
        ("asr", "/v1/audio/transcriptions", {"words": []}, "no text in it"),
        ("tts", "/v1/audio/speech", {"audio": ""}, "application/json instead of sound"),
        ("embeddings", "/v1/embeddings", ["no object"], "unreadable answer"),
    ],
)  # fmt: skip
def test_answers_that_are_not_what_was_asked_for(kind: RequestKind, path: str, reply: Any, failure: str) -> None:
    """The first answer, which is not counted, is right; the second is not."""
    right = kinds().paths[path]
    numbers = iter(range(99))
    behaviour = kinds(paths={path: lambda asked: [json_reply(200, reply)] if next(numbers) == 1 else right(asked)})
    report, _ = measure(kind, behaviour, warmup=0, audio_seconds=Pause(0.1, 0.2) if kind == "asr" else None)
    [level] = report.levels
    assert (level.failed, level.succeeded) == (1, 3)
    assert failure in level.failures[0].example


def test_a_server_without_usage() -> None:
    behaviour = kinds(paths={"/v1/embeddings": lambda asked: [json_reply(200, {"data": [{}]})]})
    report, _ = measure("embeddings", behaviour)
    assert METRICS["embeddings"].rates[1].of(only(report)) is None
    assert any("reports no usage" in note for note in report.notes)


def test_the_model_that_answers_is_found() -> None:
    def one_of(asked: Any) -> Any:
        if asked.body["model"] != "pictures":
            return [json_reply(404, {"error": {"message": "no pictures"}})]
        return [json_reply(200, {"data": [{}]})]

    behaviour = kinds(models=["words", "pictures"], paths={"/v1/images/generations": one_of})
    report, _ = measure("images", behaviour)
    assert report.model == "pictures" and any("pictures is measured" in note for note in report.notes)
    with pytest.raises(ConfigError, match=r"no pictures.*--model"):
        measure("images", behaviour, model="words")


def test_open_loops_count_from_the_time_a_request_was_due() -> None:
    behaviour = kinds(paths={"/v1/images/generations": lambda asked: [0.05, json_reply(200, {"data": [{}]})]})
    level = only(measure("images", behaviour, rates=(40.0,), arrivals="constant", requests=6)[0])
    assert level.offered_per_s == pytest.approx(40)
    assert level.rows is not None and [row.delay_ms is not None for row in level.rows] == [True] * 6
    assert level.e2el_ms is not None and level.e2el_ms.min >= 50


def test_a_sweep_goes_by_what_the_kind_counts() -> None:
    report, _ = measure("embeddings", items=Span(4, 4), sweep="concurrency", max_levels=3, requests=8, warmup=0)
    found = report.saturation
    assert found is not None and found.throughput_unit == "inputs/s"
    level = next(level for level in report.levels if level.concurrency == found.load)
    assert found.throughput == level.items_per_s


def test_large_requests_are_not_all_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.bench.client.MAX_BYTES_AHEAD", 1000)
    made = (Job(index, "/v1/rerank", bytes(400), None) for index in range(100))
    series = JobSeries(made, 50)
    series.make_ahead()
    assert next(made).index == 3, "three bodies are more than the limit"
    assert [job.index for place in range(3) if (job := series.get(place))] == [0, 1, 2]
