"""Several replicas: requests go where the gateway's router sends them, and servers that fail, start or are removed are treated
as the gateway treats them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.fakes.linear_times import LinearTimes, asked, limits, replica_options
from tonle.engine.schedule import Targets
from tonle.errors import ConfigError
from tonle.simulate.run import Autoscaling, Failure, Fleet, SimulationResult, simulate
from tonle.simulate.trace import Trace, TraceRequest

ONE = replica_options()


def run(requests: list[TraceRequest], fleet: Fleet, users: int | None = None) -> SimulationResult:
    return simulate(Trace(label="", requests=requests, users=users), fleet)


def served(result: SimulationResult) -> list[int]:
    return [replica.requests for replica in result.replicas]


def test_load_is_spread() -> None:
    fleet = Fleet(replicas=[ONE] * 4, prefix_affinity=False)
    assert served(run([asked(index, None, 50, 20) for index in range(40)], fleet, users=8)) == [10, 10, 10, 10]


def test_weights_are_shares() -> None:
    fleet = Fleet(replicas=[replace(ONE, weight=3.0), ONE], prefix_affinity=False)
    first, second = run([asked(index, None, 50, 20) for index in range(80)], fleet, users=8).replicas
    assert (first.max_running, second.max_running) == (6, 2)


def test_prompts_that_begin_alike_go_to_one_replica() -> None:
    requests = [asked(index, index * 1.0, [index % 2] * 300 + [index] * 8, 4) for index in range(20)]
    together = run(requests, Fleet(replicas=[ONE] * 4))
    assert len([count for count in served(together) if count]) <= 2
    assert sum(replica.cached_tokens for replica in together.replicas) == 18 * 288
    apart = run(requests, Fleet(replicas=[ONE] * 4, prefix_affinity=False))
    assert sorted(served(apart)) == [5, 5, 5, 5]


def test_long_prompts_go_to_replicas_for_them() -> None:
    fleet = Fleet(replicas=[replace(ONE, length="short"), replace(ONE, length="long")], length_threshold=200)
    result = run([asked(index, index * 0.5, 300 if index < 3 else 100, 4) for index in range(10)], fleet)
    assert served(result) == [7, 3]


def test_prefill_replicas_compute_prompts_and_others_answer() -> None:
    fleet = Fleet(
        replicas=[replace(ONE, role="prefill"), replace(ONE, role="decode")], prefill_threshold=128,
        kv_bytes_per_token=1000, kv_bytes_per_s=1e7, kv_latency_s=0.002,
    )  # fmt: skip
    long, short = run([asked(0, 0.0, 200, 10), asked(1, 5.0, 100, 10)], fleet).samples
    prefill_s = 0.003 + 0.005 + 200 * 0.0004 + 0.001
    move_s = 0.002 + 200 * 1000 / 1e7
    # 12 of the 12.5 blocks have come; the rest of the prompt is computed where it is answered.
    answer_s = 0.003 + 0.005 + 8 * 0.0004 + 0.001
    assert long.cached_tokens == 192 and long.ttft_s == pytest.approx(prefill_s + move_s + answer_s)
    assert short.cached_tokens == 0 and short.ttft_s == pytest.approx(0.003 + 0.005 + 100 * 0.0004 + 0.001)


def test_a_full_queue_refuses() -> None:
    fleet = Fleet(replicas=[ONE], gateway=True, max_concurrent=2, max_queued=3)
    result = run([asked(index, 0.0, 50, 20) for index in range(10)], fleet)
    failures = [sample.failure for sample in result.samples if sample.failure]
    assert len(failures) == 5 and all(failure.startswith("HTTP 429: the queue is full") for failure in failures)
    assert result.replicas[0].max_running == 2


def test_a_replica_that_dies_breaks_what_it_has_begun() -> None:
    """Requests that it had not begun to answer go to another one; new ones too."""
    slow = replace(ONE, limits=limits(max_num_seqs=2))
    fleet = Fleet(replicas=[slow] * 2, failures=[Failure(replica=0, at_s=0.2)], prefix_affinity=False)
    result = run([asked(index, 0.01 * index, 20, 60) for index in range(8)], fleet)
    broken = [sample for sample in result.samples if sample.failure]
    assert len(broken) == 2 and all(
        sample.failure == "truncated stream: connection closed: replica-0 died" for sample in broken
    )
    assert all(sample.output_tokens and sample.end_s == pytest.approx(0.2) for sample in broken)
    assert served(result) == [0, 6]


def test_a_dead_replica_is_left_out_until_it_is_seen_again() -> None:
    fleet = Fleet(replicas=[ONE] * 2, failures=[Failure(replica=0, at_s=1.0, restart_s=10.0)], prefix_affinity=False)
    result = run([asked(index, 0.5 * index, 20, 5) for index in range(80)], fleet)
    assert not any(sample.failure for sample in result.samples)
    first, second = result.replicas
    assert first.up_s == pytest.approx(result.duration_s - 10.0) and first.requests > 20 and second.requests > 20
    assert result.counts == [(0.0, 2), (1.0, 1), (11.0, 2)]


def test_without_a_gateway_a_dead_server_refuses_connections() -> None:
    fleet = Fleet(replicas=[ONE], failures=[Failure(replica=0, at_s=1.0)])
    result = run([asked(index, 0.9 * index, 20, 5) for index in range(4)], fleet)
    assert [sample.failure for sample in result.samples[2:]] == ["connection refused: replica-0 is down"] * 2


def test_a_server_without_a_gateway_answers_as_soon_as_it_is_back() -> None:
    """No circuit breaker stands before it, however many connections were refused meanwhile."""
    fleet = Fleet(replicas=[ONE], failures=[Failure(replica=0, at_s=1.0, restart_s=1.0)])
    result = run([asked(index, 0.05 * index, 20, 5) for index in range(60)], fleet)
    assert all("connection" in (sample.failure or "connection") for sample in result.samples)
    assert not any(sample.failure for sample in result.samples if sample.start_s > 2.0)


def test_a_long_queue_of_a_replica_that_dies_goes_to_another_one() -> None:
    one = replace(ONE, limits=limits(max_num_seqs=2))
    fleet = Fleet(replicas=[one] * 2, max_concurrent=2, failures=[Failure(replica=0, at_s=0.5)], prefix_affinity=False)
    result = run([asked(index, 0.0005 * index, 20, 60) for index in range(900)], fleet)
    failures = [sample.failure or "" for sample in result.samples]
    assert sum(failure.startswith("truncated stream") for failure in failures) == 2
    assert all(not failure or "truncated" in failure or "HTTP 429" in failure for failure in failures)
    assert result.replicas[1].requests > 500


def test_a_replica_that_was_removed_while_it_was_down_does_not_come_back() -> None:
    rule = Autoscaling(metric="schedule", schedule=[(0.0, 2), (3.0, 1)], every_s=1.0, down_after_s=0.0)
    failure = Failure(replica=1, at_s=1.5, restart_s=4.0)
    requests = [asked(index, 0.1 * index, 20, 5) for index in range(100)]
    result = run(requests, Fleet(replicas=[ONE] * 2, failures=[failure], autoscaling=rule))
    assert result.replicas[1].up_s == pytest.approx(1.5)


def test_replicas_are_added_when_requests_wait_and_removed_when_they_do_not() -> None:
    rule = Autoscaling(metric="queue", target=4, max=5, every_s=2.0, cold_start_s=3.0, down_after_s=20.0)
    one = replace(ONE, limits=limits(max_num_seqs=4), price_per_hour=1.0)
    burst = [asked(index, 0.1 * index, 60, 60) for index in range(300)]
    calm = [asked(300 + index, 40.0 + 2.0 * index, 60, 10) for index in range(60)]
    result = run([*burst, *calm], Fleet(replicas=[one], autoscaling=rule, prefix_affinity=False))
    assert not any(sample.failure for sample in result.samples)
    counts = [count for _, count in result.counts]
    assert max(counts) == 5 and counts[-1] == 1
    first_added = next(at_s for at_s, count in result.counts if count == 2)
    assert first_added in (5.0, 7.0, 9.0), "decided every 2 s, there 3 s later"
    assert sum(replica.cost for replica in result.replicas) < 5 * result.duration_s / 3600


def test_copies_of_a_replica_with_a_name_have_names_of_their_own() -> None:
    rule = Autoscaling(metric="queue", target=4, max=5, every_s=2.0, cold_start_s=3.0)
    one = replace(ONE, limits=limits(max_num_seqs=4), name="large")
    burst = [asked(index, 0.1 * index, 60, 60) for index in range(300)]
    result = run(burst, Fleet(replicas=[one], autoscaling=rule, prefix_affinity=False))
    assert not any(sample.failure for sample in result.samples)
    assert [each.name for each in result.replicas] == ["large", "replica-1", "replica-2", "replica-3", "replica-4"]


def test_a_schedule_says_how_many() -> None:
    rule = Autoscaling(metric="schedule", schedule=[(0.0, 1), (10.0, 3)], every_s=1.0, cold_start_s=0.5, max=3)
    result = run([asked(index, 0.5 * index, 20, 5) for index in range(60)], Fleet(replicas=[ONE], autoscaling=rule))
    assert result.counts == [(0.0, 1), (10.5, 3)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": []}, "at least one replica"),
        ({"replicas": [replace(ONE, role="prefill")]}, "none with role: decode or any"),
        ({"replicas": [replace(ONE, name="a")] * 2}, "two replicas are called a"),
        ({"replicas": [replace(ONE, name="replica-1"), ONE]}, "two replicas are called replica-1"),
        (
            {"replicas": [replace(ONE, name="replica-7")], "autoscaling": Autoscaling()},
            "replica-7 is what autoscaling may call a replica that it adds",
        ),
        ({"gateway_s": math.inf}, "gateway_s must be a number of seconds, at least 0, not inf"),
        ({"kv_latency_s": math.nan}, "kv_latency_s must be a number of seconds, at least 0, not nan"),
        ({"probe_interval_s": math.inf}, "probe_interval_s must be a number of seconds, at least 0, not inf"),
        ({"kv_bytes_per_s": math.nan}, "kv_bytes_per_s must be more than 0, not nan"),
        ({"replicas": [replace(ONE, weight=math.inf)]}, "weight must be a number above 0, not inf"),
        ({"autoscaling": Autoscaling(every_s=math.inf)}, "autoscaling: every_s must be more than 0"),
        ({"autoscaling": Autoscaling(cold_start_s=math.inf)}, "autoscaling: cold_start_s must be at least 0"),
        ({"failures": [Failure(replica=0, at_s=math.inf)]}, "at_s and restart_s are seconds"),
        ({"gateway": False}, "several replicas need a gateway"),
        ({"failures": [Failure(replica=2, at_s=1.0)]}, "replica 2 cannot fail: there are 2, counted from 0"),
        ({"autoscaling": Autoscaling(min=3, max=2)}, "1 ≤ min ≤ max"),
        ({"autoscaling": Autoscaling(metric="schedule")}, "needs a schedule"),
        ({"autoscaling": Autoscaling(metric="kv")}, "target is a share of KV blocks, such as 0.8, not 4"),
        ({"autoscaling": Autoscaling(cold_start_s=-1.0)}, "cold_start_s must be at least 0"),
        ({"failures": [Failure(replica=0, at_s=-1.0)]}, "at_s and restart_s are seconds"),
        ({"failures": [Failure(replica=0, at_s=1.0, restart_s=-1.0)]}, "at_s and restart_s are seconds"),
        ({"max_concurrent": 0}, "max_concurrent must be at least 1, not 0"),
        ({"replicas": [replace(ONE, max_queued=-1)]}, "max_queued must be at least 0, not -1"),
        ({"replicas": [replace(ONE, price_per_hour=-2.0)]}, "price_per_hour must be at least 0, not -2"),
    ],
)
def test_a_fleet_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    fleet = Fleet(**{"replicas": [ONE, ONE], **changes})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        simulate(Trace(label="", requests=[]), fleet)


def test_only_replicas_that_are_alike_can_be_resized() -> None:
    assert len(Fleet(replicas=[ONE] * 2).resized(5).replicas) == 5
    named = Fleet(replicas=[replace(ONE, name="a"), replace(ONE, name="b")]).resized(3)
    named.check()
    assert [each.name for each in named.replicas] == [None] * 3
    with pytest.raises(ConfigError, match="not alike"):
        Fleet(replicas=[ONE, replace(ONE, length="long")]).resized(3)


def test_adaptive_tuning_is_the_engines_own() -> None:
    """With a target for the time between tokens, prompts are computed in smaller pieces."""
    times = LinearTimes(step_s=0.006, row_s=0.001, token_s=0.0008)
    plain = replace(replica_options(times), limits=limits(long_prefill_tokens=512))
    tuned = replace(plain, targets=Targets(0.06, None))
    requests = [asked(index, 0.4 * index, 300, 40) for index in range(80)]
    worst = [
        max(max(sample.itl_s) for sample in run(requests, Fleet(replicas=[one])).samples[40:]) for one in (plain, tuned)
    ]
    assert worst[1] < 0.5 * worst[0]
