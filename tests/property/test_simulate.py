"""Random traces over random fleets: no request is lost or answered twice, tokens are conserved, blocks are accounted for, and
time runs forwards; leaving sequences out of plans changes nothing."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.linear_times import H200, LinearTimes, limits
from tonle.engine.schedule.step_facts import StepWork
from tonle.simulate.cluster import Cluster
from tonle.simulate.run import Autoscaling, Failure, Fleet, ReplicaOptions, simulate
from tonle.simulate.trace import Trace, TraceRequest, answer_ids

CONTEXT = 400


class Scattered(LinearTimes):
    """Steps take up to twice as long."""

    def jitter(self, work: StepWork, u: float) -> float:
        return 1 + u


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    block_size = draw(st.sampled_from([4, 16]))
    bounds = limits(
        max_num_seqs=draw(st.integers(1, 12)),
        max_num_batched_tokens=draw(st.sampled_from([12, 64, 512])),
        long_prefill_tokens=draw(st.sampled_from([8, 256])),
        context_length=CONTEXT,
        block_size=block_size,
        prefix_caching=draw(st.booleans()),
    )
    times = draw(st.sampled_from([LinearTimes(read_s=1e-8), H200, Scattered(), Scattered(lag=1, launch_s=1e-3)]))
    least = -(-CONTEXT // block_size)
    one = ReplicaOptions(
        times=times, limits=bounds, num_blocks=least + draw(st.integers(0, 3 * least)), price_per_hour=1.0
    )
    replicas = [one] * draw(st.integers(1, 4))
    if len(replicas) > 1 and draw(st.booleans()):
        replicas[0] = replace(one, role="prefill")
    if len(replicas) > 2 and draw(st.booleans()):
        replicas[1] = replace(one, length="long")
    autoscaling = draw(
        st.sampled_from([None, None, Autoscaling(target=2, every_s=1, cold_start_s=0.5, down_after_s=3, max=5)])
    )
    failures = [Failure(replica=draw(st.integers(0, len(replicas) - 1)), at_s=draw(st.floats(0.0, 3.0)),
                        restart_s=draw(st.sampled_from([None, 0.5, 4.0])))] if draw(st.booleans()) else []  # fmt: skip
    return Fleet(
        replicas=replicas,
        failures=failures,
        autoscaling=autoscaling,
        prefix_affinity=draw(st.booleans()),
        length_threshold=100,
        prefill_threshold=64,
        max_concurrent=draw(st.sampled_from([2, 48])),
        max_queued=draw(st.sampled_from([0, 3, 512])),
        probe_interval_s=1.0,
        kv_bytes_per_token=1000,
        kv_bytes_per_s=1e6,
    )


def random_trace(seed: int) -> Trace:
    rng = random.Random(seed)
    users = rng.choice([None, 1, 5])
    requests: list[TraceRequest] = []
    at_s = 0.0
    for index in range(rng.randint(1, 25)):
        before = rng.choice(requests) if requests and rng.random() < 0.3 else None
        if before is not None and all(each.follows != before.index for each in requests):
            prompt = before.prompt + answer_ids(before.index, before.output_tokens) + [rng.randrange(50)]
        else:
            before = None
            prompt = [7] * rng.choice([0, 64]) + [rng.randrange(50) for _ in range(rng.randint(1, 200))]
        at_s += rng.expovariate(10)
        requests.append(
            TraceRequest(
                index=index, arrival_s=None if users or before else at_s, prompt=prompt, output_tokens=rng.randint(1, 90),
                follows=None if before is None else before.index, pause_s=rng.random(), priority=rng.choice([2, 2, 3]),
                owner=rng.choice(["", "", "tenant"]),
            )
        )  # fmt: skip
    return Trace(label="random", requests=requests, users=users)


@settings(max_examples=60, deadline=None)
@given(fleets(), st.integers(0, 2**32))
def test_every_request_ends_once(fleet: Fleet, seed: int) -> None:
    trace = random_trace(seed)
    cluster = Cluster(fleet, trace, seed=1, skip=True)
    cluster.run()
    samples = {sample.index: sample for sample in cluster.samples}
    assert len(samples) == len(cluster.samples)
    for request in trace.requests:
        if request.index not in samples:  # a conversation ends with a turn that fails
            assert request.follows is not None
            assert request.follows not in samples or samples[request.follows].failure is not None
            continue
        sample = samples[request.index]
        if sample.failure is None:
            assert sample.output_tokens == len(sample.arrivals_s) == request.output_tokens
            assert sample.prompt_tokens == len(request.prompt) > (sample.cached_tokens or 0)
            assert sample.begin_s < sample.arrivals_s[0] and sample.last_s == sample.arrivals_s[-1] == sample.end_s
            assert sample.arrivals_s == sorted(sample.arrivals_s)
        elif len(request.prompt) + request.output_tokens > CONTEXT and not fleet.failures and fleet.max_queued:
            assert "exceed the context" in sample.failure or "HTTP 429" in sample.failure
        if request.follows is not None:
            assert sample.start_s >= samples[request.follows].end_s + request.pause_s - 1e-9
    for server in cluster.servers:
        gate = server.backend.gate
        assert gate.num_inside == gate.num_queued == 0, "a place at the gateway was not given back"
        if server.replica is not None:
            server.replica.verify()
            assert not server.under_way and server.replica.scheduler.idle
            assert server.replica.scheduler.pool.num_held == 0


@settings(max_examples=60, deadline=None)
@given(fleets(), st.integers(0, 2**32))
def test_leaving_sequences_out_changes_nothing(fleet: Fleet, seed: int) -> None:
    trace = random_trace(seed)
    fast, plain = simulate(trace, fleet), simulate(trace, fleet, skip=False)
    assert fast.samples == plain.samples
    assert fast.replicas == plain.replicas
    assert fast.counts == plain.counts
