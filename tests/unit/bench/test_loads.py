"""Loads against the scripted server: waits that a stalled server or client causes, ramps, sweeps, SLOs, several processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench.scripted import (
    STREAM_END,
    STREAM_HEAD,
    Asked,
    Behaviour,
    Script,
    json_reply,
    serving,
    text_event,
    usage_event,
)
from tonle.bench import Bench, BenchOptions, BenchReport, LevelReport, Span, run_bench
from tonle.bench.client import Client, LevelTask, Share
from tonle.bench.client_processes import ClientProcesses
from tonle.bench.load import Load
from tonle.bench.measure import Circumstances, ClientUse, Sample, report_level
from tonle.bench.report import remark
from tonle.bench.self_check import client_remarks
from tonle.bench.slo import Slo
from tonle.bench.workload import Job
from tonle.errors import ConfigError, InternalError

SHORT: dict[str, Any] = {"input_tokens": Span(8, 8), "output_tokens": Span(4, 4), "warmup": 0}
STALL_S = 0.4


def measure(behaviour: Behaviour, **options: Any) -> BenchReport:
    with serving(behaviour) as server:
        return run_bench(BenchOptions(url=server.url, **(SHORT | options)))


# -- what a caller would have waited counts, whoever held it up


def assert_waits_count(level: LevelReport) -> None:
    """Requests came every 10 ms, and nothing was answered for 400: those due in that time waited for its end."""
    assert level.rows is not None
    rows = sorted(level.rows, key=lambda row: row.start_s)
    waits_ms = [row.ttft_ms or 0.0 for row in rows]
    first = next(place for place, wait_ms in enumerate(waits_ms) if wait_ms > 1e3 * STALL_S - 30)
    for place in range(first, first + 30):
        left_ms = 1e3 * STALL_S - 10 * (place - first) - 30
        assert waits_ms[place] >= left_ms, f"request {place} was due {10 * (place - first)} ms into the stall"


def test_a_server_that_stalls() -> None:
    def stall(asked: Asked) -> Script | None:
        if asked.number == 10:
            time.sleep(STALL_S)  # the whole server: its event loop does nothing else meanwhile
        return None

    level = measure(Behaviour(script=stall), rates=(100.0,), arrivals="constant", requests=80).levels[0]
    assert level.failed == 0
    assert_waits_count(level)


def test_a_client_that_cannot_send_in_time() -> None:
    class Stalling:
        num_answered = 0

        def started(self, *_: Any) -> None: ...
        def finished(self, level: Any) -> None: ...
        def answered(self, sample: Sample) -> None:
            self.num_answered += 1
            if self.num_answered == 10:
                time.sleep(STALL_S)  # the client's event loop

    with serving() as server:
        options = BenchOptions(url=server.url, rates=(100.0,), arrivals="constant", requests=80, **SHORT)
        report = run_bench(options, Stalling())
    level = report.levels[0]
    assert_waits_count(level)
    assert level.max_send_delay_ms is not None and level.max_send_delay_ms > 1e3 * STALL_S - 50
    assert level.clients[0].late_max_ms > 1e3 * STALL_S - 50
    assert any("after its time; its latencies include that" in note for note in report.notes)


# -- open loops


def test_a_ramp_sends_more_and_more() -> None:
    level = measure(Behaviour(), ramp=(0.0, 100.0), duration_s=0.8, arrivals="constant").levels[0]
    assert (level.label, level.concurrency, level.rate) == ("ramp 0-100/s, constant", None, 50.0)
    assert level.requests == 40
    assert level.rows is not None
    assert sum(row.start_s < 0.4 for row in level.rows) == pytest.approx(10, abs=1)


def test_bursts_are_labelled_and_sent() -> None:
    level = measure(Behaviour(), rates=(200.0,), burstiness=0.3, requests=20).levels[0]
    assert (level.label, level.succeeded) == ("rate 200/s, gamma 0.3", 20)
    assert level.offered_per_s is not None


def test_a_sweep_by_users() -> None:
    """A server that answers four at once: one user after the other gets a turn."""
    turns = threading.Semaphore(4)  # counts only; the server is one event loop

    def limited(asked: Asked) -> Script | None:
        def steps() -> Script:
            while not turns.acquire(blocking=False):
                yield 0.002
            yield STREAM_HEAD
            yield 0.1  # long beside what it costs a busy machine
            yield text_event(" a", "length") + usage_event(8, asked.body["max_tokens"], 0) + STREAM_END
            turns.release()

        return steps() if asked.number else None

    slo = Slo.parse(["e2el-p50=10s"])
    report = measure(Behaviour(script=limited), sweep="concurrency", output_tokens=Span(1, 1), slo=slo)
    found = report.saturation
    assert found is not None and found.load is not None
    assert 2 <= found.load <= 16
    assert found.limited_by == "throughput"
    assert [level.concurrency for level in report.levels] == sorted(level.concurrency or 0 for level in report.levels)
    assert len(report.levels) >= 4


# -- an SLO


def test_levels_are_judged() -> None:
    slo = Slo.parse(["ttft-p95=20ms", "e2el-p99=10s"])
    report = measure(Behaviour(first_pause_s=0.03), requests=4, warmup=1, slo=slo)
    level = report.levels[0]
    assert [result.holds for result in level.slo] == [False, True]
    assert (level.goodput_per_s, level.good_share, level.warmup) == (0.0, 0.0, 1)
    assert not report.slo_held
    assert report.settings["slo"] == "TTFT p95 ≤ 20 ms, E2EL p99 ≤ 10 s"


# -- several processes


@pytest.mark.parametrize("load", [{"concurrency": (3, 5)}, {"rates": (60.0,)}], ids=["closed", "open"])
def test_processes_share_the_load(load: dict[str, Any]) -> None:
    """Each request is sent once, by one of them; nothing is lost on the way back."""
    with serving(Behaviour(pause_s=0.005)) as server:
        report = run_bench(BenchOptions(url=server.url, processes=2, requests=17, **(SHORT | load)))
        sent = [json.dumps(asked.body["prompt"]) for asked in server.completions]
        num_connections = server.num_connections
    assert report.ok
    assert len(sent) == len(set(sent)) == 1 + 17 * len(report.levels)  # and one probe
    for level in report.levels:
        assert (level.requests, level.output_tokens, len(level.clients)) == (17, 17 * 4, 2)
        assert level.rows is not None
        assert sorted(row.index for row in level.rows) == list(range(17))
        assert all(0 <= row.start_s < 60 for row in level.rows)
    assert num_connections >= 3  # of two clients and the one that asked about the server


def test_processes_send_what_one_process_would(tmp_path: Path) -> None:
    """The same prompts at the same moments; a file goes on where the level before stopped."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(40)))
    seen = []
    for processes in (1, 2):
        with serving() as server:
            options = BenchOptions(
                url=server.url, file=file, rates=(200.0, 300.0), requests=12, processes=processes, warmup=0
            )
            report = run_bench(options)
            moments = [sorted((row.index, row.start_s) for row in level.rows or []) for level in report.levels]
            seen.append((sorted(asked.body["prompt"] for asked in server.completions), moments))
    (prompts, moments), (other_prompts, other_moments) = seen
    assert prompts == other_prompts == sorted(f"p{number}" for number in range(24))
    for level, other in zip(moments, other_moments, strict=True):
        assert [index for index, _ in level] == [index for index, _ in other]
        assert [start_s for _, start_s in level] == pytest.approx([start_s for _, start_s in other], abs=1e-5)


def test_processes_stop_and_bring_what_they_have() -> None:
    async def run(url: str) -> BenchReport:
        answered = asyncio.Event()

        class Eager:
            def started(self, *_: Any) -> None: ...
            def finished(self, level: Any) -> None: ...
            def answered(self, sample: Sample) -> None:
                answered.set()

        bench = Bench(BenchOptions(url=url, requests=100_000, processes=2, concurrency=(2,), **SHORT), Eager())
        task = asyncio.create_task(bench.run())
        await asyncio.wait_for(answered.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return bench.report(interrupted=True)

    with serving(Behaviour(pause_s=0.002)) as server:
        report = asyncio.run(run(server.url))
    level = report.levels[0]
    assert level.interrupted
    assert 1 <= level.succeeded < 100_000
    assert len(level.clients) == 2


def test_a_process_that_is_killed_is_an_error_and_no_hang() -> None:
    async def run(url: str) -> None:
        options = BenchOptions(url=url, processes=2, concurrency=(2,), requests=100_000, **SHORT)
        sender = ClientProcesses(options)
        pids: list[int] = []

        def keep(sample: Sample) -> None:
            while pids:
                os.kill(pids.pop(), signal.SIGKILL)

        try:
            await sender.prepare(LevelTask(Endless(), 0, Load("concurrency", 2)))
            pids.append(sender._children[0].process.pid)
            await asyncio.wait_for(sender.drive(keep), 60)
        finally:
            await sender.close()

    with serving(Behaviour(pause_s=0.002)) as server, pytest.raises(InternalError, match="SIGKILL"):
        asyncio.run(run(server.url))


class Endless:
    def jobs(self, level: int, phase: str) -> Any:
        body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True}).encode()
        return (Job(index, "/v1/completions", body, None) for index in range(10**9))


def test_users_are_dealt_out_evenly() -> None:
    shares = [Share(place, 3).users(Load("concurrency", 7)) for place in range(3)]
    assert shares == [3, 2, 2]


def test_an_answer_of_no_server_reaches_the_caller_with_several_processes_too() -> None:
    with serving() as server:
        pass
    with pytest.raises(ConfigError, match="nothing answers"):
        run_bench(BenchOptions(url=server.url, processes=2))


# -- the client's own speed


def use(cpu_share: float, late_ms: float = 1.0) -> ClientUse:
    return ClientUse(cpu_share=cpu_share, late_p99_ms=late_ms, late_max_ms=late_ms)


def test_a_client_that_keeps_up_says_nothing() -> None:
    report = measure(Behaviour(pause_s=0.005), requests=4)
    client = report.levels[0].clients[0]
    assert 0 < client.cpu_share < 1.5
    assert list(client_remarks(level_with(use(0.3)))) == []


@pytest.mark.parametrize(
    ("clients", "cores", "text"),
    [
        ([use(0.95)], 8, "used 95% of a core, so that latencies include its own delays; spread it with --processes 2"),
        ([use(0.95), use(0.9)], 8, "spread it with --processes 4"),
        ([use(0.95), use(0.9)], 3, "spread it with --processes 3"),
        ([use(0.95), use(0.9)], 2, "this machine has no more cores for it: run the client on a larger one"),
        ([use(0.2, 35.0)], 8, "had to wait for a core: its timers fired 35 ms late (p99)"),
    ],
)
def test_a_client_that_was_the_limit(
    clients: list[ClientUse], cores: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    (remark,) = client_remarks(level_with(*clients))
    assert text in remark


def test_a_replay_is_not_told_to_use_more_processes() -> None:
    (remark,) = client_remarks(level_with(use(0.95), users=None))
    assert "a lower --speed" in remark and "--processes" not in remark


def level_with(*clients: ClientUse, users: int | None = 1) -> LevelReport:
    return report_level([], Circumstances(label="x", concurrency=users, clients=list(clients)))


def test_timers_are_looked_at_while_requests_run() -> None:
    async def run(url: str) -> ClientUse:
        options = BenchOptions(url=url, concurrency=(1,), requests=3, **SHORT)
        client = Client(options)
        await client.prepare(LevelTask(Endless(), 0, Load("concurrency", 1)))
        await client.drive(lambda sample: time.sleep(0.1))
        await client.close()
        return client.uses()[0]

    with serving(Behaviour(pause_s=0.02)) as server:
        assert asyncio.run(run(server.url)).late_max_ms > 50


def test_a_server_that_refuses_all_is_no_success_of_a_sweep() -> None:
    full = json_reply(503, {"error": {"message": "full"}})
    report = measure(Behaviour(script=lambda asked: [full] if asked.number else None), sweep="concurrency")
    assert report.saturation is not None
    assert report.saturation.load is None
    assert "no request was answered" in report.saturation.why


def test_the_same_remark_about_several_levels_is_made_once() -> None:
    levels = [level_with(use(share)) for share in (0.95, 0.3, 0.91, 0.99)]
    (note,) = remark(levels, BenchOptions())
    assert note.startswith("x: the client was the limit, or near it: its busiest process used 95% of a core")
    assert note.endswith("(and so at x, x)")
    (note,) = remark([levels[0]] * 7, BenchOptions())
    assert note.endswith("(and so at 6 other levels)")
