"""Simulations whose results can be computed by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.fakes.linear_times import H200, LinearTimes, asked, limits, replica_options
from tonle.engine.schedule.step_facts import StepWork
from tonle.errors import ConfigError
from tonle.simulate.run import Fleet, simulate
from tonle.simulate.trace import Trace, answer_ids


def alone(times: LinearTimes) -> Fleet:
    return Fleet(replicas=[replica_options(times)])


def test_one_user_waits_for_the_prompt_and_then_for_each_step() -> None:
    times = LinearTimes()
    [sample] = simulate(Trace(label="", requests=[asked(0, None, 100, 20)], users=1), alone(times)).samples
    assert sample.ttft_s == pytest.approx(0.003 + (0.005 + 100 * 0.0004) + 0.001)
    assert sample.itl_s == pytest.approx([0.005 + 0.0012] * 19)
    assert (sample.prompt_tokens, sample.cached_tokens, sample.output_tokens) == (100, 0, 20)
    assert sample.finish_reason == "length" and sample.failure is None


def test_a_step_is_launched_while_the_one_before_is_computed() -> None:
    """With lag 1 the host's time is hidden, unless it takes longer than the device."""
    trace = Trace(label="", requests=[asked(0, None, 100, 20)], users=1)
    [sample] = simulate(trace, alone(H200)).samples
    assert sample.ttft_s == pytest.approx(0.003 + 0.0003 + (0.0016 + 100 * 4e-6) + 0.001)
    assert sample.itl_s == pytest.approx([0.0016 + 1e-5] * 19)
    [slow] = simulate(trace, alone(replace(H200, launch_s=0.004))).samples
    # The last token is read without another launch.
    assert slow.itl_s[2:-1] == pytest.approx([0.004] * 16)


def test_a_prompt_that_comes_during_a_step_waits_for_its_end() -> None:
    requests = [asked(0, 0.0, 16, 40), asked(1, 0.101, 64, 1)]
    times = LinearTimes()
    first, second = simulate(Trace(label="", requests=requests), alone(times)).samples
    arrived = 0.101 + times.front_s
    begin = next(at_s - times.back_s for at_s in first.arrivals_s if at_s - times.back_s >= arrived)
    step_s = 0.005 + 0.0012 + 64 * 0.0004  # both are in it
    assert second.arrivals_s == pytest.approx([begin + step_s + times.back_s])
    assert max(first.itl_s) == pytest.approx(step_s)


def test_what_the_client_sees_of_many_rows_comes_later() -> None:
    class Front(LinearTimes):
        front_gap_s = 0.010
        back_row_s = 0.002

    requests = [asked(index, 0.0, 16, 3) for index in range(2)]
    first, second = simulate(Trace(label="", requests=requests), alone(Front())).samples
    # The second reaches the loop 10 ms after the first, while that one is in its second step.
    assert first.arrivals_s[0] == pytest.approx(0.010 + 0.005 + 16 * 0.0004 + 0.001 + 0.002)
    assert second.arrivals_s[0] > first.arrivals_s[0]
    assert second.ttft_s is not None and second.ttft_s > 0.020


def test_mail_that_comes_while_a_step_is_published_is_in_the_next_plan() -> None:
    """A step of one row takes 1.61 ms; its tokens are read at the end, and published for 0.5 ms after that."""
    times = replace(H200, launch_s=0.0003, publish_s=0.0005)
    first = simulate(Trace(label="", requests=[asked(0, 0.0, 16, 40)]), alone(times)).samples[0]
    read_s = first.arrivals_s[20] - times.back_s

    def first_token_s(reaches_loop_s: float) -> float:
        requests = [asked(0, 0.0, 16, 40), asked(1, reaches_loop_s - times.front_s, 64, 1)]
        return simulate(Trace(label="", requests=requests), alone(times)).samples[1].arrivals_s[0]

    early, late = first_token_s(read_s + 0.0004), first_token_s(read_s + 0.0006)
    assert late - early == pytest.approx(0.0016 + 1e-5), "one step later"


def test_a_user_takes_a_moment_between_two_requests_and_the_loop_one_to_wake() -> None:
    class Around(LinearTimes):
        turns_s = (0.0004, 0.0006)
        wake_s = 0.002

    requests = [asked(index, None, 16, 3) for index in range(40)]
    samples = simulate(Trace(label="", requests=requests, users=1), alone(Around())).samples
    turns = [after.start_s - (before.last_s or 0.0) for before, after in pairwise(samples)]
    assert {round(turn_s, 6) for turn_s in turns} == {0.0004, 0.0006}
    assert samples[0].ttft_s == pytest.approx(0.003 + 0.002 + 0.005 + 16 * 0.0004 + 0.001)
    assert samples[0].itl_s == pytest.approx([0.005 + 0.0012] * 2), "only the first step is late"


def test_the_way_to_the_loop_scatters() -> None:
    class Around(LinearTimes):
        front_scatter_s = (-0.001, 0.004)

    requests = [asked(index, 0.5 * index, 16, 1) for index in range(60)]
    samples = simulate(Trace(label="", requests=requests), alone(Around())).samples
    usual_s = 0.003 + 0.005 + 16 * 0.0004 + 0.001
    extra = {round((sample.ttft_s or 0.0) - usual_s, 6) for sample in samples}
    assert extra == {-0.001, 0.004}


def test_a_request_beyond_the_context_is_refused() -> None:
    requests = [asked(0, None, 2000, 100), asked(1, None, 10, 5)]
    first, second = simulate(Trace(label="", requests=requests, users=1), alone(LinearTimes())).samples
    assert first.failure is not None and first.failure.startswith(
        "HTTP 400: prompt (2000 tokens) + max_length (100) exceed"
    )
    assert second.failure is None and second.start_s == pytest.approx(first.end_s + 0.05)


def test_a_pool_that_holds_no_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="10 blocks of 16 tokens do not hold one context of 2048"):
        simulate(Trace(label="", requests=[asked(0, 0.0, 5, 1)]), Fleet(replicas=[replica_options(num_blocks=10)]))


def test_a_single_server_queues_as_theory_says() -> None:
    """M/D/1: Poisson arrivals, one request at a time, each of the same length."""
    rng, at_s, requests, load = random.Random(5), 0.0, [], 0.7
    service_s = 0.005 + 10 * 0.0004
    for index in range(6000):
        at_s += rng.expovariate(load / service_s)
        requests.append(asked(index, at_s, 10, 1))
    one = replace(replica_options(), limits=limits(max_num_seqs=1))
    samples = simulate(Trace(label="", requests=requests), Fleet(replicas=[one])).samples
    waited_s = [(sample.ttft_s or 0.0) - 0.003 - service_s - 0.001 for sample in samples]
    assert min(waited_s) > -1e-9
    assert sum(waited_s) / len(waited_s) == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.1)


def test_a_later_turn_finds_the_blocks_of_the_turn_before_and_its_answer() -> None:
    first = asked(0, 0.0, 100, 60)
    prompt = first.prompt + answer_ids(0, 60) + [3] * 20
    second = asked(1, None, prompt, 10, follows=0, pause_s=2.0)
    before, after = simulate(Trace(label="", requests=[first, second]), alone(LinearTimes())).samples
    # All full blocks but those of the last token, which was never computed.
    assert after.cached_tokens == 144
    assert after.start_s == pytest.approx(before.end_s + 2.0) and after.due_s == after.start_s
    assert (before.conversation, before.turn, after.conversation, after.turn) == (0, 0, 0, 1)


def test_other_owners_share_no_prefix() -> None:
    requests = [asked(index, float(index), [5] * 200, 3, owner=owner) for index, owner in enumerate(["a", "b", "a"])]
    samples = simulate(Trace(label="", requests=requests), alone(LinearTimes())).samples
    assert [sample.cached_tokens for sample in samples] == [0, 0, 192]


def test_scatter_makes_steps_longer_and_is_the_same_for_the_same_seed() -> None:
    class Scattered(LinearTimes):
        def jitter(self, work: StepWork, u: float) -> float:
            return 1 + u

    trace = Trace(label="", requests=[asked(0, None, 50, 400)], users=1)
    runs = [simulate(trace, alone(Scattered()), seed=seed) for seed in (1, 1, 2)]
    assert runs[0].samples == runs[1].samples != runs[2].samples
    gaps = runs[0].samples[0].itl_s
    assert min(gaps) >= 0.0062 - 1e-9 and sum(gaps) / len(gaps) == pytest.approx(1.5 * 0.0062, rel=0.05)


def test_the_result_says_what_replicas_did_and_cost() -> None:
    one = replica_options(price_per_hour=36.0)
    requests = [asked(index, None, 100, 20) for index in range(10)]
    result = simulate(Trace(label="ten", requests=requests, users=2), Fleet(replicas=[one]))
    level = result.level()
    assert (level.label, level.concurrency, level.succeeded, level.output_tokens) == ("ten", 2, 10, 200)
    [replica] = result.replicas
    assert (replica.requests, replica.output_tokens, replica.prompt_tokens) == (10, 200, 1000)
    assert replica.cost == pytest.approx(0.01 * result.duration_s)
    assert result.cost_per_million_tokens == pytest.approx(replica.cost / 200 * 1e6)
    assert 0.9 < replica.busy_share <= 1 and 1 < replica.rows_per_step <= 2


def test_a_closed_loop_ends_at_its_time() -> None:
    requests = [asked(index, None, 10, 5) for index in range(1000)]
    result = simulate(Trace(label="", requests=requests, users=3, until_s=1.0), alone(LinearTimes()))
    assert 3 < len(result.samples) < 1000
    assert max(sample.start_s for sample in result.samples) < 1.0 < result.duration_s
