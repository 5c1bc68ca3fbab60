"""Seconds: what ended requests and backends make of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonle.edge.listening import run
from tonle.observe.backend_state import BackendState
from tonle.observe.sample import NAMES, Sample
from tonle.observe.sampler import MOST_SHOWN, RECENT_S, SCRAPE_S, Sampler
from tonle.observe.seen_request import SeenRequest
from tonle.telemetry.fine_buckets import bucket_of

START = 1_700_000_000


@dataclass
class Queue:
    num_inside: int = 0
    num_queued: int = 0


@dataclass
class Watched:
    name: str = "b0"
    local: bool = False
    is_up: bool = True
    price_per_hour: float | None = None
    gate: Queue = field(default_factory=Queue)


@dataclass
class Gaps:
    counts: list[int]
    buckets: list[int]


class Clock:
    def __init__(self) -> None:
        self.now = float(START)

    def __call__(self) -> float:
        return self.now


def seen(**fields: Any) -> SeenRequest:
    basics = {"id": "r", "arrived": START + 0.5, "path": "/v1/chat/completions", "status": "ok", "backend": "b0", "sent_s": 0.0,
              "ttft_s": 0.1, "last_s": 1.1, "total_s": 1.2, "prompt_tokens": 7, "completion_tokens": 11}  # fmt: skip
    return SeenRequest(**basics | fields)


def state(at: float = START, name: str = "b0", **fields: Any) -> BackendState:
    return BackendState(name=name, at=at, **fields)


class Seconds:
    """A sampler with its samples."""

    def __init__(self, *backends: Watched, **options: Any) -> None:
        self.clock = Clock()
        self.sampler = Sampler(backends, clock=self.clock, **options)
        self.samples: list[Sample] = []
        self.sampler.listen(self.samples.append)

    def next(self) -> Sample:
        self.clock.now += 1
        self.sampler.close_until(int(self.clock.now))
        return self.samples[-1]


def test_backends_that_come_and_go() -> None:
    backends = [Watched()]
    seconds = Seconds()
    seconds.sampler = Sampler(backends, clock=seconds.clock)
    seconds.sampler.listen(seconds.samples.append)
    seconds.next()
    backends.append(Watched(name="late"))
    seconds.sampler.told(state(name="late", running=3, generation_tokens=10))
    assert seconds.next().running.total == 3
    del backends[1]
    assert seconds.next().running.total == 0 and "late" not in seconds.sampler.states
    seconds.sampler.count([seen(backend="late")])  # its last request ends
    assert seconds.next().output_tokens == 11
    seconds.sampler.lost("late")  # an answer that comes after it is gone is no mistake


def test_every_name_has_a_value() -> None:
    assert len(NAMES) == len(set(NAMES)) == 26
    assert all(value in (0, None) for value in Sample(START).values().values())


def test_a_second_of_requests() -> None:
    seconds = Seconds(Watched())
    for fields in (
        {}, {"status": "failed", "error": "upstream_failed"}, {"status": "interrupted", "error": "shutting_down"},
        {"status": "refused", "error": "rate_limit", "completion_tokens": 0}, {"status": "cached", "cache": "hit"},
        {"cache": "miss"}, {"status": "refused", "error": "rate_limit", "prompt_tokens": 0, "completion_tokens": 0},
    ):  # fmt: skip
        seconds.sampler.count([seen(**fields)])
    sample = seconds.next()
    values = sample.values()
    assert sample.t == START and values["requests_per_s"] == 7
    assert values["failed_per_s"] == 2 and values["refused_per_s"] == 2 and values["cache_hit_rate"] == 0.5
    assert values["output_tokens_per_s"] == 4 * 11, "of neither the refused nor the one from the cache"
    assert sample.e2e.count == 4 and sample.ttft.count == 4
    assert sample.itl.count == 3 * 10, "each gap counts; an answer from the cache has none"
    assert values["itl_p50"] == pytest.approx(0.1, rel=0.03) and values["e2e_p95"] == pytest.approx(1.2, rel=0.03)
    assert seconds.sampler.errors() == {"rate_limit": 2, "upstream_failed": 1, "shutting_down": 1}
    assert seconds.sampler.latest is sample and len(seconds.sampler.ended) == 7
    empty = seconds.next()
    assert empty.requests == 0 and seconds.sampler.ended == []


def test_percentiles_are_those_of_the_last_minute() -> None:
    seconds = Seconds(Watched())
    assert seconds.sampler.percentiles()["ttft_p95"] is None
    seconds.sampler.count([seen(ttft_s=5.0)])
    seconds.next()
    for number in range(RECENT_S - 1):
        seconds.sampler.count([seen(ttft_s=0.1 if number % 2 else 0.2)])
        seconds.next()
    found = seconds.sampler.percentiles()
    assert found["ttft_p50"] == pytest.approx(0.1, rel=0.03) or found["ttft_p50"] == pytest.approx(0.2, rel=0.03)
    assert found["ttft_p99"] is not None and found["ttft_p99"] > 1, "the slowest is still there"
    seconds.next()
    after = seconds.sampler.percentiles()
    assert after["ttft_p99"] == pytest.approx(0.2, rel=0.03), "and is no longer"


def test_what_no_model_computed_is_no_latency() -> None:
    seconds = Seconds(Watched())
    seconds.sampler.count([seen(path="/tokenize", computed=False)])
    sample = seconds.next()
    assert sample.requests == 1 and sample.e2e.count == sample.ttft.count == 0


def test_a_caller_that_gives_up_counts_once_it_waited_too_long() -> None:
    seconds = Seconds(patience_s=2.0)
    for total_s in (1.9, 2.1):
        seconds.sampler.count([seen(status="cancelled", total_s=total_s)])
    sample = seconds.next()
    assert sample.e2e.count == 1 and sample.ttft.count == 0


def test_errors_are_those_of_the_last_minute_and_few() -> None:
    seconds = Seconds()
    for number in range(200):
        seconds.sampler.count([seen(status="failed", error=f"invented-{number}")])
    seconds.next()
    errors = seconds.sampler.errors()
    assert len(errors) <= 51 and sum(errors.values()) == 200 and errors["other"] == 150
    assert len(seconds.sampler.ended) == MOST_SHOWN and seconds.sampler.ended[-1].error == "invented-199"
    for _ in range(RECENT_S - 1):
        seconds.next()
    assert seconds.sampler.errors()
    seconds.next()
    assert not seconds.sampler.errors()


def test_the_engine_of_this_process_is_counted_by_its_own_counters() -> None:
    told = [state(generation_tokens=100, prompt_tokens=10, prefix_hits=0, prefix_queries=0, running=3, waiting=2, kv_usage=0.5,
                  prefix_missed={"new": 5})]  # fmt: skip
    gaps = Gaps([0, 4, 0], [bucket_of(0.01), bucket_of(0.05), bucket_of(0.2)])
    seconds = Seconds(Watched(local=True), read_local=lambda: told[-1], gaps=gaps)
    assert seconds.next().output_tokens == 0, "what it counted before is not of this second"
    told.append(state(generation_tokens=150, prompt_tokens=30, prefix_hits=12, prefix_queries=20, running=4, waiting=0,
                      kv_usage=0.6, prefix_missed={"new": 13, "tail": 1}))  # fmt: skip
    gaps.counts[:] = [0, 7, 1]
    seconds.sampler.count([seen(is_local=True)])
    sample = seconds.next()
    assert sample.output_tokens == 50 and sample.prompt_tokens == 20, "of a request that ended nothing is added"
    assert sample.itl.count == 4 and sample.itl.percentile(100) == pytest.approx(0.2, rel=0.03)
    values = sample.values()
    assert values["prefix_hit_rate"] == 0.6 and values["running"] == 4 and values["kv_usage"] == 0.6
    assert seconds.sampler.prefix_missed() == {"new": 8, "tail": 1}
    told.append(state(generation_tokens=8))  # a new engine
    assert seconds.next().output_tokens == 8


def test_a_scraped_backend_is_spread_over_the_seconds_until_the_next_reading() -> None:
    seconds = Seconds(Watched())
    seconds.sampler.told(state(generation_tokens=1000))
    seconds.sampler.count([seen()])
    assert seconds.next().output_tokens == 0
    seconds.sampler.told(state(generation_tokens=1500))
    # One second more than until the next reading, which may be late.
    assert [seconds.next().output_tokens for _ in range(7)] == pytest.approx([500 / 6] * 6 + [0])


def test_a_backend_that_does_not_tell_is_counted_when_requests_end() -> None:
    seconds = Seconds(Watched())
    seconds.sampler.told(state(running=2))  # without tokens, as of a gateway
    seconds.sampler.count([seen()])
    assert seconds.next().output_tokens == 11


def test_a_backend_that_falls_silent_is_counted_by_requests_that_begin_after_that() -> None:
    seconds = Seconds(Watched())
    seconds.sampler.told(state(generation_tokens=1000))
    for _ in range(3):
        seconds.next()
        seconds.sampler.lost("b0")
    assert not seconds.sampler.states
    seconds.sampler.count([seen(arrived=START + 1)])
    assert seconds.next().output_tokens == 0, "a part of it was counted"
    seconds.sampler.count([seen(arrived=START + 3.5)])
    assert seconds.next().output_tokens == 11
    seconds.sampler.told(state(generation_tokens=5000))
    assert seconds.next().output_tokens == 0, "counting begins again with this reading"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.sampled_from([0, 0, 0, 1])), min_size=5, max_size=40))
@settings(max_examples=60)
def test_no_token_is_counted_twice(rounds: list[tuple[bool, int, int]]) -> None:
    """Rounds of five seconds: whether the reading at the end works, requests that begin in it, whether the backend restarts.
    Requests write a token a second for seven seconds."""
    seconds, running, written, counter = Seconds(Watched()), list[tuple[float, int]](), 0, 0
    all_work = all(works for works, _, restarts in rounds) and not any(restarts for _, _, restarts in rounds)
    seconds.sampler.told(state(generation_tokens=0)) if all_work else None
    for works, begin, restarts in [*rounds, (True, 0, 0), (True, 0, 0), (True, 0, 0)]:
        running += [(seconds.clock.now + 0.5, 0)] * begin
        for _ in range(int(SCRAPE_S)):
            running = [(arrived, tokens + 1) for arrived, tokens in running]
            written, counter = written + len(running), counter + len(running)
            for arrived, tokens in running:
                if tokens == 7:
                    seconds.sampler.count([seen(arrived=arrived, completion_tokens=7)])
            running = [each for each in running if each[1] < 7]
            seconds.next()
        counter = 0 if restarts else counter
        seconds.sampler.told(state(generation_tokens=counter)) if works else seconds.sampler.lost("b0")
    for _ in range(int(SCRAPE_S)):
        seconds.next()
    counted = sum(sample.output_tokens for sample in seconds.samples)
    assert counted <= written + 1e-6
    if all_work:
        assert counted == pytest.approx(written)


def test_all_backends_together() -> None:
    seconds = Seconds(
        Watched("b0", price_per_hour=3.6), Watched("b1", price_per_hour=7.2, is_up=False),
        Watched("b2", gate=Queue(num_inside=5, num_queued=2)), burn_rate=lambda: 0.4,
    )  # fmt: skip
    seconds.sampler.told(state(name="b0", running=1, waiting=2, kv_usage=0.2, gpu_memory_used=10, gpu_memory_total=20))
    seconds.sampler.told(
        state(name="b1", running=2, kv_usage=0.4, gpu_memory_used=5, gpu_memory_total=20, gpu_utilization=0.5)
    )
    seconds.sampler.count([seen(backend="b2", cost=0.01, completion_tokens=500)])
    values = seconds.next().values()
    assert values["running"] == 1 + 2 + 5 and values["waiting"] == 2 + 2
    assert values["kv_usage"] == pytest.approx(0.3) and values["gpu_utilization"] == 0.5
    assert values["gpu_memory_used"] == 15 and values["gpu_memory_total"] == 40 and values["burn_rate"] == 0.4
    assert values["cost_per_request"] == 0.01
    assert values["cost_per_million_tokens"] == pytest.approx(0.001 / 500 * 1e6), "b1 is down, and b2 has no price"


def test_a_stalled_event_loop_is_no_gap_and_a_machine_that_slept_is_one() -> None:
    seconds = Seconds()
    seconds.sampler.count([seen()])
    seconds.sampler.close_until(START + 4)
    assert [sample.t - START for sample in seconds.samples] == [0, 1, 2, 3]
    assert [sample.requests for sample in seconds.samples] == [1, 0, 0, 0]
    seconds.sampler.close_until(START + 1000)
    assert [sample.t - START for sample in seconds.samples[4:]] == [4]
    seconds.sampler.close_until(START + 900)  # the clock was set back
    seconds.sampler.close_until(START + 901)
    assert seconds.samples[-1].t == START + 900


def test_a_listener_that_fails_does_not_disturb_the_others() -> None:
    seconds, told = Seconds(), list[Sample]()

    def fail(sample: Sample) -> None:
        raise ValueError("on purpose")

    seconds.sampler.listen(fail)
    end = seconds.sampler.listen(told.append)
    sample = seconds.next()
    end()
    end()
    seconds.next()
    assert told == [sample] and len(seconds.samples) == 2


def test_the_timer_closes_seconds_until_it_is_stopped() -> None:
    async def main() -> None:
        sampler, second = Sampler(), asyncio.Event()
        samples: list[Sample] = []

        def on_sample(sample: Sample) -> None:
            samples.append(sample)
            second.set()

        sampler.listen(on_sample)
        sampler.start()
        async with asyncio.timeout(120):
            await second.wait()
        count = len(samples)
        sampler.count([seen()])
        sampler.stop()
        sampler.stop()
        assert len(samples) == count + 1 and samples[-1].requests == 1, "what came last is not lost"
        assert [sample.t for sample in samples] == list(range(samples[0].t, samples[0].t + len(samples)))

    run(main())


def test_answers_side_by_side_do_not_make_the_gaps_of_one_look_shorter() -> None:
    one = seen(ttft_s=0.5, last_s=1.5, completion_tokens=11)
    four = seen(ttft_s=0.5, last_s=1.5, completion_tokens=44, num_answers=4)
    assert one.itl_s == pytest.approx(0.1) and four.itl_s == pytest.approx(0.1)
    assert (one.num_gaps, four.num_gaps) == (10, 40)
    assert seen(ttft_s=0.5, last_s=1.5, completion_tokens=4, num_answers=4).itl_s is None
