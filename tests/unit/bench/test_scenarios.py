"""The scenarios against a scripted server and against an object of the library's shape."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from tests.unit.bench.scripted import Behaviour, json_reply, serving
from tests.unit.bench.scripted_engine import LibraryEngine
from tonle.bench import BenchOptions, ScenarioOptions, Scenarios, run_bench, run_scenarios
from tonle.errors import ConfigError

QUICK = ScenarioOptions(requests=10, concurrency=4, warmup=1, seed=1, sla_s=60)


def test_a_tonle_server_runs_all_three() -> None:
    with serving(Behaviour(inference=True)) as server:
        report = run_scenarios(server.url, QUICK)
        asked = [each.body for each in server.completions]
    assert report.ok and report.notes == []
    assert (report.asked_by, report.model, report.target) == ("/api/v1/inference", "scripted", server.url)
    assert [(each.label, each.concurrency, each.cache_hits) for each in report.scenarios] == [
        ("sequential, no cache", 1, 0),
        ("sequential, with cache", 1, 4),
        ("concurrent, 4 at once", 4, 0),
    ]
    assert all(each.succeeded == 10 and each.output_tokens == 20 for each in report.scenarios)
    assert [body["use_cache"] for body in asked] == [False] * 12 + [True] * 11 + [False] * 11
    assert {(body["max_tokens"], body["temperature"], body["model"]) for body in asked} == {(16, 0, "scripted")}


def test_the_latency_is_that_of_the_client() -> None:
    with serving(Behaviour(inference=True, first_pause_s=0.05)) as server:
        report = run_scenarios(server.url, ScenarioOptions(requests=5, concurrency=5, warmup=0, seed=1, sla_s=60))
    for number in (0, 2):
        latency = report.scenarios[number].latency_s
        assert latency is not None and latency.min >= 0.05


def test_a_server_without_the_inference_path_is_asked_by_chat() -> None:
    with serving() as server:
        report = run_scenarios(server.url, QUICK)
        paths = {each.path for each in server.completions[1:]}
        body = server.completions[-1].body
    assert report.ok and report.asked_by == "/v1/chat/completions"
    assert [each.label for each in report.scenarios] == ["sequential, no cache", "concurrent, 4 at once"]
    assert all(each.cache_hit_rate is None for each in report.scenarios)
    assert "HTTP 404: Not Found" in report.notes[0] and '"sequential, with cache" was left out' in report.notes[1]
    assert paths == {"/v1/chat/completions"}
    assert body["max_tokens"] == 16 and "use_cache" not in body, "other servers may refuse what they do not know"


@pytest.mark.parametrize("inference", [True, False])
def test_failed_requests_are_counted_and_grouped(*, inference: bool) -> None:
    broken = json_reply(500, {"error": {"message": "boom"}})
    odd = json_reply(200, {"something": "else"})
    answers = {6: [broken], 7: [odd]}
    with serving(Behaviour(inference=inference, script=lambda asked: answers.get(asked.number))) as server:
        report = run_scenarios(server.url, QUICK)
    first = report.scenarios[0]
    assert (first.succeeded, first.failed, first.meets_sla) == (8, 2, False)
    assert [group.example.partition(":")[0] for group in first.failures] == ["HTTP 500", "unreadable answer"]
    assert first.why_not == "2 of 10 requests failed"
    assert not report.ok and report.scenarios[1].failed == 0


def test_a_server_that_takes_no_questions() -> None:
    broken = json_reply(400, {"error": {"message": "no chat template"}})
    with (
        serving(Behaviour(inference=True, script=lambda asked: [broken])) as server,
        pytest.raises(
            ConfigError, match=r"does not answer a simple question: /v1/chat/completions says HTTP 400: no chat"
        ),
    ):
        run_scenarios(server.url, QUICK)


def test_nothing_listens() -> None:
    with serving() as server:
        pass
    with pytest.raises(ConfigError, match="tonle serve"):
        run_scenarios(server.url, QUICK)


def test_a_timeout_is_a_failure() -> None:
    with serving(Behaviour(inference=True, script=lambda asked: [5.0] if asked.number == 2 else None)) as server:
        report = run_scenarios(server.url, ScenarioOptions(requests=3, warmup=0, seed=1, timeout_s=1.0))
    assert report.scenarios[0].failures[0].example.startswith("timeout")


def test_an_engine_passed_in() -> None:
    engine = LibraryEngine()
    report = run_scenarios(engine, QUICK)
    assert report.ok and report.notes == []
    assert (report.target, report.asked_by, report.model) == ("LibraryEngine", "generate_async", "tiny")
    assert [each.cache_hits for each in report.scenarios] == [0, 4, 0]
    assert [use_cache for _, use_cache in engine.asked] == [False] * 11 + [True] * 11 + [False] * 11
    assert engine.most_running == 4
    assert engine.settings == {"max_tokens": 16}
    assert all(each.output_tokens == 30 for each in report.scenarios)


def test_an_engine_inside_a_running_loop() -> None:
    async def main() -> bool:
        return (await Scenarios(LibraryEngine(), QUICK).run()).ok

    assert asyncio.run(main())


@pytest.mark.filterwarnings("error")  # such as: a coroutine was never awaited
def test_inside_a_running_loop_the_error_says_what_to_await() -> None:
    async def in_a_notebook() -> None:
        with pytest.raises(RuntimeError, match=r"as in a notebook.* await Scenarios\(target, options\)\.run\(\)"):
            run_scenarios(LibraryEngine(), QUICK)
        with pytest.raises(RuntimeError, match=r"await Bench\(options\)\.run\(\)"):
            run_bench(BenchOptions())

    asyncio.run(in_a_notebook())


def test_what_an_engine_raises_is_a_failed_request() -> None:
    def stumble(number: int) -> None:
        if number == 5:
            raise MemoryError("out of blocks")

    report = run_scenarios(LibraryEngine(stumble), QUICK)
    assert report.scenarios[0].failures[0].example == "MemoryError: out of blocks"
    assert not report.ok


def test_an_engine_of_the_smallest_shape() -> None:
    class Smallest:
        async def generate_async(self, user_input: str, *, use_cache: bool) -> tuple[str, dict[str, Any]]:
            return "an answer", {"latency": 0.0, "cache_hit": False}

    report = run_scenarios(Smallest(), QUICK)
    assert "takes no max_tokens" in report.notes[0]
    assert "switched off" in report.notes[1]
    assert [each.failed for each in report.scenarios] == [0, 0, 0]


def test_an_engine_that_is_slow_or_returns_something_else() -> None:
    class Slow:
        async def generate_async(self, user_input: str, *, use_cache: bool) -> Any:
            if not use_cache:
                await asyncio.sleep(30)
            return "only text"

    report = run_scenarios(Slow(), ScenarioOptions(requests=1, warmup=0, timeout_s=0.05))
    failures = [each.failures[0].example for each in report.scenarios]
    assert failures[0] == "timeout: no answer in 0.05 s"
    assert failures[1] == "unreadable answer: generate_async returned str, not (response, metadata)"


def test_an_object_that_is_no_engine() -> None:
    with pytest.raises(ConfigError, match=r"object cannot be measured: it needs an async method generate_async"):
        run_scenarios(object())  # type: ignore[arg-type]


def test_a_seed_repeats_a_run_and_without_one_each_is_new() -> None:
    def asked(seed: int | None) -> list[tuple[str, bool]]:
        engine = LibraryEngine()
        run_scenarios(engine, ScenarioOptions(requests=5, concurrency=1, seed=seed))
        return engine.asked

    assert asked(3) == asked(3)
    assert asked(None) != asked(None)


def test_ctrl_c_keeps_what_was_measured() -> None:
    def interrupt(number: int) -> None:
        if number == 16:  # inside the second scenario
            os.kill(os.getpid(), signal.SIGINT)

    report = run_scenarios(LibraryEngine(interrupt), QUICK)
    assert report.interrupted and not report.ok
    assert [each.interrupted for each in report.scenarios] == [False, True]
    assert report.scenarios[0].succeeded == 10 and 1 <= report.scenarios[1].succeeded < 10


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"requests": 0}, "requests must be from 1 to 5000, not 0"),
        ({"requests": 5001}, "requests"),
        ({"warmup": -1}, "warmup"),
        ({"repeat_share": 1.0}, "repeat_share must be at least 0 and less than 1, not 1"),
        ({"repeat_share": float("nan")}, "repeat_share"),
        ({"concurrency": 0}, "concurrency must be at least 1, not 0"),
        ({"output_tokens": 0}, "output_tokens"),
        ({"sla_s": 0.0}, "sla must be more than 0 seconds, not 0"),
        ({"timeout_s": float("inf")}, "timeout"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Scenarios(LibraryEngine(), ScenarioOptions(**settings))
