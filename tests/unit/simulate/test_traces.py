"""Traces: the requests that `tonle bench` sends with the same options; files and audit trails."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest

from tests.unit.audit.trails import running
from tests.unit.bench.test_replay import ask_at, question
from tonle.bench.arrivals import arrival_times
from tonle.bench.options import BenchOptions, Pause, Span
from tonle.bench.synthetic import ASSUMED_IDS, PromptScale, SyntheticWorkload
from tonle.errors import ConfigError
from tonle.simulate.traces import trace_of_workload

IDS = PromptScale("ids", tuple(ASSUMED_IDS))


def test_synthetic_requests_are_those_of_the_benchmark() -> None:
    options = BenchOptions(
        rates=(5.0,),
        requests=40,
        input_tokens=Span(32, 400),
        output_tokens=Span(1, 50),
        shared_prefix_tokens=64,
        seed=7,
    )
    trace = trace_of_workload(options)
    jobs = itertools.islice(SyntheticWorkload(options, "m", IDS).jobs(0, "run"), 40)
    bodies = [msgspec.json.decode(job.body) for job in jobs]
    assert [request.prompt for request in trace.requests] == [body["prompt"] for body in bodies]
    assert [request.output_tokens for request in trace.requests] == [body["max_tokens"] for body in bodies]
    moments = list(itertools.islice(arrival_times(options.levels[0], seed=7), 40))
    assert [request.arrival_s for request in trace.requests] == moments
    assert (trace.label, trace.rate, trace.users) == ("rate 5/s", 5.0, None)


def test_a_closed_loop_takes_requests_in_order() -> None:
    trace = trace_of_workload(BenchOptions(concurrency=(4,)), 12)
    assert (trace.users, len(trace.requests), trace.label) == (4, 12, "concurrency 4")
    assert all(request.arrival_s is None for request in trace.requests)
    assert len(trace_of_workload(BenchOptions(concurrency=(4,))).requests) == 16
    with pytest.raises(ConfigError, match="has no number of requests"):
        trace_of_workload(BenchOptions(concurrency=(4,), duration_s=5.0))


def test_later_turns_have_the_answers_before_them() -> None:
    options = BenchOptions(concurrency=(2,), requests=3, turns=Span(3, 3), think_time=Pause(1.0, 2.0))
    requests = trace_of_workload(options).requests
    assert [request.follows for request in requests] == [None, 0, 1, None, 3, 4, None, 6, 7]
    for before, after in itertools.pairwise(requests):
        if after.follows is not None:
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert len(after.prompt) == len(before.prompt) + before.output_tokens + 128
            assert 1.0 <= after.pause_s <= 2.0


def test_texts_of_a_file_that_begin_alike_share_their_first_tokens(tmp_path: Path) -> None:
    shared = "You are a careful assistant. " * 10
    lines = [{"prompt": shared + "One?", "max_tokens": 5}, {"prompt": shared + "Two, and more?"}, {"prompt": [1, 2, 3]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    first, second, third, again = trace_of_workload(BenchOptions(file=file, output_tokens=Span(9, 9)), 4).requests
    assert len(first.prompt) == -(-len(shared + "One?") // 4)
    assert (
        first.prompt[: len(shared) // 4] == second.prompt[: len(shared) // 4] and first.prompt[-1] != second.prompt[-1]
    )
    assert third.prompt == [1, 2, 3] and again.prompt == first.prompt
    assert [first.output_tokens, second.output_tokens] == [5, 9]


def test_an_audit_trail_keeps_times_counts_and_prefixes(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Answer briefly, in one sentence. " * 20}
    ask = {"role": "user", "content": "What is a gate?"}
    answer = {"role": "assistant", "content": "the same answer"}
    usage = {"prompt_tokens": 150, "completion_tokens": 40}
    with running(tmp_path) as trail:
        ask_at(trail, 0.0, question("x") | {"messages": [system, ask]}, usage=usage)
        ask_at(
            trail, 2.0, question("x") | {"messages": [system, {"role": "user", "content": "Another one!"}]}, usage=usage
        )
        later = question("x") | {"messages": [system, ask, answer, {"role": "user", "content": "And a lock?"}]}
        ask_at(trail, 4.0, later, usage={"prompt_tokens": 260, "completion_tokens": 7})
    first, second, third = trace_of_workload(BenchOptions(replay=tmp_path, speed=2.0)).requests
    assert [request.arrival_s for request in (first, second, third)] == pytest.approx([0.0, 1.0, 2.0], abs=1e-4)
    assert [len(request.prompt) for request in (first, second, third)] == [150, 150, 260]
    assert [request.output_tokens for request in (first, second, third)] == [40, 40, 7]
    common = next(
        place for place, pair in enumerate(zip(first.prompt, second.prompt, strict=True)) if pair[0] != pair[1]
    )
    assert 100 < common < 150
    assert third.prompt[:190] == first.prompt + [third.prompt[150]] * 40, "it goes on from the first one and its answer"
    assert first.owner == "key-1"
