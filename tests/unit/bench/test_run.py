"""Whole benchmarks against the scripted server: counts, failures, loops, notes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.bench.scripted import (
    STREAM_END,
    STREAM_HEAD,
    Asked,
    Behaviour,
    Cut,
    Script,
    Step,
    event,
    frame,
    json_reply,
    serving,
    text_event,
    usage_event,
)
from tonle.bench import Bench, BenchOptions, BenchReport, Load, Span, arrival_times, run_bench
from tonle.bench.drive import open_loop
from tonle.bench.measure import Sample
from tonle.bench.workload import Job
from tonle.errors import ConfigError


def measure(behaviour: Behaviour, **options: Any) -> BenchReport:
    fields: dict[str, Any] = {"input_tokens": Span(16, 16), "output_tokens": Span(4, 4), "warmup": 0} | options
    with serving(behaviour) as server:
        return run_bench(BenchOptions(url=server.url, **fields))


def after_probe(script: Callable[[Asked], Script | None]) -> Behaviour:
    """The probe is answered well, all requests after it by the script."""
    return Behaviour(script=lambda asked: script(asked) if asked.number else None)


def test_counts_of_a_closed_loop() -> None:
    with serving(Behaviour(cached_tokens=2)) as server:
        report = run_bench(
            BenchOptions(
                url=server.url, concurrency=(1, 3), requests=7, warmup=2,
                input_tokens=Span(16, 16), output_tokens=Span(5, 5), keep_requests=True,
            )
        )  # fmt: skip
        sent = [asked.body for asked in server.completions]
    assert len(sent) == 1 + 2 * (2 + 7)  # one probe; warm-up and requests of two levels
    assert len({json.dumps(body["prompt"]) for body in sent}) == len(sent)
    assert report.ok
    assert (report.model, report.prompt_kind, report.interrupted) == ("scripted", "ids", False)
    assert [level.concurrency for level in report.levels] == [1, 3]
    for level in report.levels:
        assert (level.requests, level.succeeded, level.failed, level.failures) == (7, 7, 0, [])
        assert (level.prompt_tokens, level.cached_tokens, level.output_tokens) == (7 * 16, 7 * 2, 7 * 5)
        assert level.counted_by == ["usage"]
        assert level.output_tokens_per_s == pytest.approx(35 / level.duration_s)
        assert level.total_tokens_per_s == pytest.approx((35 + 112) / level.duration_s)
        assert level.rows is not None
        assert sorted(row.index for row in level.rows) == list(range(7))
        assert {row.finish_reason for row in level.rows} == {"length"}
        assert {len(row.itl_ms) for row in level.rows} == {4}


def test_pauses_of_the_server_are_the_latencies() -> None:
    """Lower bounds only: a busy machine can be slower than the script, never faster."""
    report = measure(Behaviour(first_pause_s=0.1, pause_s=0.02), requests=2, keep_requests=True)
    level = report.levels[0]
    assert level.rows is not None
    for row in level.rows:
        assert row.ttft_ms is not None and row.tpot_ms is not None and row.e2el_ms is not None
        assert row.ttft_ms > 95
        assert row.e2el_ms > 150
        assert row.tpot_ms == pytest.approx((row.e2el_ms - row.ttft_ms) / 3, abs=0.01)
        assert sum(row.itl_ms) <= row.e2el_ms - row.ttft_ms + 0.01
    assert level.duration_s * 1e3 >= sum(row.e2el_ms or 0 for row in level.rows)


def test_closed_loop_keeps_exactly_so_many_under_way() -> None:
    under_way, most = 0, 0

    def steps() -> Script:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        yield STREAM_HEAD
        yield 0.02
        yield text_event(" a", "stop") + usage_event(16, 4)
        under_way -= 1
        yield STREAM_END

    report = measure(after_probe(lambda asked: steps()), concurrency=(3,), requests=12)
    assert report.ok
    assert most == 3


def test_tokens_per_chunk_change_gaps_not_counts() -> None:
    level = measure(Behaviour(tokens_per_chunk=2), requests=3).levels[0]
    assert level.output_tokens == 12
    assert level.itl_ms is not None
    assert level.itl_ms.count == 3


def test_chat_counts_like_completions() -> None:
    level = measure(Behaviour(words_overhead=5), requests=3, endpoint="chat").levels[0]
    assert (level.succeeded, level.output_tokens, level.prompt_tokens) == (3, 12, 48)


def test_without_usage_chunks_are_counted_and_the_report_says_so() -> None:
    report = measure(Behaviour(usage=False, tokens_per_chunk=2), requests=3)
    level = report.levels[0]
    assert report.ok  # a count of chunks cannot prove a wrong number of tokens
    assert (level.output_tokens, level.counted_by, level.prompt_tokens) == (6, ["chunks"], None)
    assert any("count of chunks" in note for note in report.notes)
    assert any("prompt tokens are unknown" in note for note in report.notes)


@pytest.mark.parametrize(
    ("steps", "example"),
    [
        ([json_reply(500, {"error": {"message": "out of memory"}})], "HTTP 500: out of memory"),
        ([json_reply(422, {"detail": "no such field"})], "HTTP 422: no such field"),
        ([STREAM_HEAD, text_event(" a"), 10.0], "timeout: no full answer in 1 s"),
        ([STREAM_HEAD, text_event(" a"), Cut()], "truncated stream: connection closed: by the server"),
        ([STREAM_HEAD, text_event(" a"), b"0\r\n\r\n"], "truncated stream: ended without finish reason or [DONE]"),
        ([Cut()], "connection closed: by the server, before it answered"),
        ([STREAM_HEAD, text_event(" a", "stop"), usage_event(16, 1), STREAM_END], "wrong token count: 1 instead of 4"),
        ([STREAM_HEAD, frame(event({"error": {"message": "died"}})), STREAM_END], "error in stream: died"),
        ([json_reply(200, {"choices": []})], "unreadable answer: not an event stream but application/json"),
    ],
)
def test_failures_are_named_and_counted(steps: Script, example: str) -> None:
    timeout_s = 1.0 if example.startswith("timeout") else 30.0
    report = measure(after_probe(lambda asked: steps), concurrency=(2,), requests=2, timeout_s=timeout_s)
    level = report.levels[0]
    assert not report.ok
    assert (level.succeeded, level.failed, level.output_tokens) == (0, 2, 0)
    assert [(group.count, group.example) for group in level.failures] == [(2, example)]


def test_a_connection_dropped_right_after_done_is_no_failure() -> None:
    steps: list[Step] = [STREAM_HEAD, text_event(" a", "length"), usage_event(16, 4), frame(b"data: [DONE]\n\n"), Cut()]
    assert measure(after_probe(lambda asked: steps), requests=2).ok


def test_some_fail_and_the_rest_is_measured() -> None:
    broken = json_reply(503, {"error": {"message": "busy"}})
    report = measure(after_probe(lambda asked: [broken] if asked.number % 3 == 0 else None), requests=9)
    level = report.levels[0]
    assert (level.succeeded, level.failed) == (6, 3)
    assert level.output_tokens == 24
    assert level.ttft_ms is not None
    assert level.ttft_ms.count == 6


def test_a_server_that_dies_is_refused_connections_not_a_crash() -> None:
    with serving() as server:
        bench = Bench(BenchOptions(url=server.url, concurrency=(1, 2), requests=2, warmup=0))

        class Stopper:
            def started(self, *_: Any) -> None: ...
            def answered(self, sample: Sample) -> None: ...
            def finished(self, level: Any) -> None:
                if level.concurrency == 1:
                    server.stop()

        bench._watch = Stopper()
        report = asyncio.run(bench.run())
    assert report.levels[0].failed == 0
    assert [group.example.split(":")[0] for group in report.levels[1].failures] == ["connection refused"]


def test_early_ends_hint_at_ignore_eos() -> None:
    short = [STREAM_HEAD, text_event(" a", "stop"), usage_event(16, 1), STREAM_END]
    report = measure(after_probe(lambda asked: short), requests=1)
    assert any("--no-ignore-eos" in note for note in report.notes)
    assert measure(after_probe(lambda asked: short), requests=1, ignore_eos=False).ok


def test_duration_ends_a_level_and_awaits_what_is_under_way() -> None:
    level = measure(Behaviour(first_pause_s=0.05), concurrency=(2,), duration_s=0.4).levels[0]
    assert level.failed == 0
    assert 2 <= level.requests <= 2 * 8 + 2  # 0.05 s at least for each of two users
    assert level.duration_s >= 0.35


def test_requests_limit_a_duration() -> None:
    assert measure(Behaviour(), requests=3, duration_s=60.0).levels[0].requests == 3


def test_open_loop_sends_without_waiting() -> None:
    """No answer before all ten have been asked, which no closed loop of fewer than ten users would do."""
    asked_for = 0

    def steps() -> Script:
        nonlocal asked_for
        asked_for += 1
        yield STREAM_HEAD
        for _ in range(1000):
            if asked_for == 10:
                break
            yield 0.01
        else:
            return  # no answer at all
        yield text_event(" a", "stop") + usage_event(16, 4, 0) + STREAM_END

    level = measure(after_probe(lambda asked: steps()), rates=(500.0,), requests=10).levels[0]
    assert (level.rate, level.concurrency, level.succeeded) == (500.0, None, 10)
    assert level.max_send_delay_ms is not None


def test_arrivals_are_poisson_and_seeded() -> None:
    """Due times, read off instant answers: the mean gap of 400 is within a few standard errors (5 %) of 1 / rate."""

    async def due_times(seed: int) -> list[float]:
        samples: list[Sample] = []

        async def send(job: Job) -> Sample:
            now = time.perf_counter()
            return Sample(index=job.index, start_s=now, end_s=now)

        jobs = iter([Job(index, "", b"", None) for index in range(400)])
        timed = zip(arrival_times(Load("rate", 5000.0), seed=seed), jobs, strict=False)
        await open_loop(timed, begin_s=time.perf_counter(), send=send, keep=samples.append)
        samples.sort(key=lambda sample: sample.index)
        due = [sample.start_s - (sample.delay_s or 0.0) for sample in samples]
        return [moment - due[0] for moment in due]

    first, again, other = (asyncio.run(due_times(seed)) for seed in (1, 1, 2))
    assert first == pytest.approx(again, abs=0.005)
    assert first[-1] != pytest.approx(other[-1], rel=1e-6)
    assert first[-1] == pytest.approx(400 / 5000, rel=0.3)


def test_a_cache_that_has_seen_the_prompts_is_pointed_out() -> None:
    report = measure(Behaviour(cached_tokens=100), requests=2, input_tokens=Span(128, 128))
    assert any("another --seed" in note for note in report.notes)
    planned = measure(Behaviour(cached_tokens=100), requests=2, shared_prefix_tokens=100)
    assert not any("--seed" in note for note in planned.notes)


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a b c", "max_tokens": 2}\n{"messages": [{"role": "user", "content": "d"}]}\n')
    report = measure(Behaviour(), file=path, requests=4)
    level = report.levels[0]
    assert (level.prompt_tokens, level.output_tokens) == (2 * 3 + 2 * 1, 2 * 2 + 2 * 4)
    assert report.prompt_kind == "file"
    assert any("more than once" in note for note in report.notes)


def test_a_server_without_keep_alive() -> None:
    assert measure(Behaviour(keep_alive=False), requests=3, concurrency=(2,)).ok


def test_it_refuses_to_start_on_bad_settings() -> None:
    with pytest.raises(ConfigError, match="requests"):
        run_bench(BenchOptions(requests=0))


def test_cancelling_keeps_what_was_measured() -> None:
    async def run(url: str) -> BenchReport:
        answered = asyncio.Event()

        class Eager:
            def started(self, *_: Any) -> None: ...
            def finished(self, level: Any) -> None: ...
            def answered(self, sample: Sample) -> None:
                answered.set()

        bench = Bench(BenchOptions(url=url, requests=1000, warmup=0), Eager())
        task = asyncio.create_task(bench.run())
        await answered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return bench.report(interrupted=True)

    with serving(Behaviour(pause_s=0.002)) as server:
        report = asyncio.run(run(server.url))
    assert report.interrupted
    assert not report.ok
    assert report.levels[0].interrupted
    assert 1 <= report.levels[0].succeeded < 1000


def test_an_independent_client_sees_the_same() -> None:
    """A few lines of httpx on the same script: equal counts; throughput set by the server's pauses, so alike."""
    behaviour = Behaviour(first_pause_s=0.03, pause_s=0.01)
    requests, tokens = 4, 12

    def other(url: str) -> tuple[int, int]:
        counted, chunks = 0, 0
        with httpx.Client() as client:
            for _ in range(requests):
                body = {"prompt": "a b", "max_tokens": tokens, "stream": True}
                with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
                    for line in reply.iter_lines():
                        if not line.startswith("data: {"):
                            continue
                        document = json.loads(line.removeprefix("data: "))
                        chunks += bool(document["choices"] and document["choices"][0]["text"])
                        counted += (document.get("usage") or {}).get("completion_tokens", 0)
        return counted, chunks

    with serving(behaviour) as server:
        options = BenchOptions(url=server.url, requests=requests, warmup=0, output_tokens=Span(tokens, tokens))
        level = run_bench(options).levels[0]
        counted, chunks = other(server.url)
    assert level.output_tokens == counted == requests * tokens
    assert level.itl_ms is not None
    assert level.itl_ms.count == chunks - requests
    assert level.output_tokens_per_s == pytest.approx(counted / level.duration_s)


def test_an_address_without_a_scheme_is_http() -> None:
    assert Bench(BenchOptions(url="localhost:9000/v1")).report().url == "http://localhost:9000"
