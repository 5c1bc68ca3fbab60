"""The advice held against the simulator: the recommended fleet in virtual time, with the real scheduler and the real routing.

Does: make a trace of the workload and a fleet of the sizing, simulate, judge the SLO. Does not: correct the sizing
(`correct.py`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import islice

import msgspec

from tonle.advise.capacity import BLOCK
from tonle.advise.choose import Question, Sizing
from tonle.advise.workload import Workload
from tonle.bench.measure import Circumstances, LevelReport, Sample, report_level
from tonle.simulate.fleet import Fleet, ReplicaOptions
from tonle.simulate.result import SimulationResult
from tonle.simulate.run import simulate
from tonle.simulate.trace import Trace, TraceRequest
from tonle.telemetry.percentile import percentile

_ROUNDS = 4  # requests for each one that is under way at a time; the first round is not counted: batches fill
_LEAST, _MOST = 200, 1200  # requests of a simulation
_WARMUP = 1 / _ROUNDS  # share of an open loop's requests
_OWN_IDS = 1 << 20  # token ids of requests' own tokens begin here


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation of one sizing gave. `holds` None: there is no SLO."""

    label: str
    replicas: int
    gpus: int
    requests: int
    warmup: int
    failed: int
    holds: bool | None
    bounds: list[str]
    good_share: float | None
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_mean_ms: float | None
    itl_p99_ms: float | None
    e2el_p95_ms: float | None
    short_ttft_p95_ms: float | None  # of prompts below the length threshold
    busy_share: float  # of the devices
    preemptions: int
    cost_per_million_output_tokens: float | None  # None: no price was given
    virtual_s: float
    wall_s: float


def run_check(question: Question, sizing: Sizing, label: str, *, users: int | None = None) -> Check:
    """`users`: a closed loop of so many instead of the workload's own load."""
    trace = trace_of(question.workload, sizing, users=users)
    result = simulate(trace, fleet_of_sizing(question, sizing))
    samples = sorted(result.samples, key=lambda sample: sample.index)
    warmup = trace.users if trace.users is not None else int(_WARMUP * len(samples))
    counted = samples[min(warmup, len(samples) - 1) :]
    level = report_level(counted, Circumstances(label=label, concurrency=trace.users, slo=question.slo, warmup=warmup))
    return _check(question, sizing, level, _steady(samples, counted), counted, result)


def trace_of(workload: Workload, sizing: Sizing, *, users: int | None = None, seed: int = 0) -> Trace:
    """Requests of the workload's lengths, each with tokens of its own after the shared prefix."""
    rng = random.Random(seed)
    places = sum(group.replicas * group.settings.max_num_seqs for group in sizing.groups)
    users = users or (workload.users if workload.rate is None else None)
    if users is None and workload.rate is None:
        users = places
    running = users if users is not None else min(places, _running(workload, sizing))
    count = max(_LEAST, min(_MOST, _ROUNDS * running))
    if users is not None:
        count = max(count, 2 * users)
    requests, at_s = [], 0.0
    prefix = list(range(workload.shared_prefix))
    for index, (prompt, answer) in enumerate(islice(_drawn(workload, rng), count)):
        if users is None:
            assert workload.rate is not None
            at_s += rng.expovariate(workload.rate)
        requests.append(
            TraceRequest(
                index=index,
                arrival_s=None if users is not None else at_s,
                prompt=prefix + [_OWN_IDS + index] * (prompt - len(prefix)),
                output_tokens=answer,
            )
        )
    return Trace(label=workload.label, requests=requests, users=users)


def _running(workload: Workload, sizing: Sizing) -> int:
    """Requests under way at the workload's rate, if none waits: rate times latency."""
    option = sizing.option
    latency_s = (option.ttft_floor_ms["p50"] + workload.mean_answer * option.tpot_ms) / 1e3
    return math.ceil((workload.rate or 0.0) * latency_s)


def _drawn(workload: Workload, rng: random.Random) -> Iterator[tuple[int, int]]:
    while True:
        yield rng.choice(workload.lengths)


def fleet_of_sizing(question: Question, sizing: Sizing) -> Fleet:
    replicas = []
    for group in sizing.groups:
        settings = group.settings
        price = (question.price_per_hour or 0.0) * group.option.times.gpus
        one = ReplicaOptions(
            times=group.option.times,
            limits=settings.limits(
                prefix_caching=question.workload.shared_prefix > 0
            ),  # without hits it only takes time
            num_blocks=group.option.capacity.kv_tokens // BLOCK,
            length=group.length,
            price_per_hour=price,
            max_concurrent=settings.max_num_seqs,
        )
        replicas += [one] * group.replicas
    return Fleet(replicas=replicas, gateway=True, length_threshold=question.length_threshold)


def _steady(samples: list[Sample], counted: list[Sample]) -> tuple[float, float]:
    """Requests and output tokens per second while requests still come: the batch that empties at the end is not counted."""
    begin_s = counted[0].start_s
    end_s = max(sample.start_s for sample in counted)
    if end_s <= begin_s:
        return 0.0, 0.0
    ended = sum(begin_s <= sample.end_s < end_s for sample in samples if sample.failure is None)
    tokens = sum(begin_s <= at_s < end_s for sample in samples for at_s in sample.arrivals_s)
    return ended / (end_s - begin_s), tokens / (end_s - begin_s)


def _check(
    question: Question,
    sizing: Sizing,
    level: LevelReport,
    steady: tuple[float, float],
    samples: list[Sample],
    result: SimulationResult,
) -> Check:
    short = [
        sample.ttft_s
        for sample in samples
        if sample.ttft_s is not None and (sample.prompt_tokens or 0) < question.length_threshold
    ]
    busy = [replica.busy_share for replica in result.replicas]
    requests_per_s, tokens_per_s = steady if steady[1] else (level.requests_per_s, level.output_tokens_per_s)
    cost = None
    if question.price_per_hour is not None and tokens_per_s:
        cost = question.price_per_hour * sizing.gpus / 3600 / tokens_per_s * 1e6
    return Check(
        label=level.label,
        replicas=sizing.replicas,
        gpus=sizing.gpus,
        requests=level.requests,
        warmup=level.warmup,
        failed=level.failed,
        holds=all(bound.holds for bound in level.slo) and not level.failed if question.slo else None,
        bounds=[str(bound) for bound in level.slo],
        good_share=level.good_share,
        requests_per_s=requests_per_s,
        output_tokens_per_s=tokens_per_s,
        ttft_p50_ms=None if level.ttft_ms is None else level.ttft_ms.p50,
        ttft_p95_ms=None if level.ttft_ms is None else level.ttft_ms.p95,
        tpot_mean_ms=None if level.tpot_ms is None else level.tpot_ms.mean,
        itl_p99_ms=None if level.itl_ms is None else level.itl_ms.p99,
        e2el_p95_ms=None if level.e2el_ms is None else level.e2el_ms.p95,
        short_ttft_p95_ms=_p95_ms(short),
        busy_share=math.fsum(busy) / len(busy) if busy else 0.0,
        preemptions=sum(replica.preemptions for replica in result.replicas),
        cost_per_million_output_tokens=cost,
        virtual_s=result.duration_s,
        wall_s=result.wall_s,
    )


def _p95_ms(seconds: list[float]) -> float | None:
    return 1e3 * percentile(sorted(seconds), 95) if seconds else None
