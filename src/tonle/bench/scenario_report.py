"""`ScenarioReport`: what the scenarios found, as data; how one is summed up and held against the target (the SLA).

Does: summarize samples, judge, read a saved report. Does not: ask, print (`scenario_blocks.py`) or save (`report.py`).

Latency is counted at the client, from sending the question to the end of the answer. The SLA is met if P95 is below the
target, with a failed request counted as slower than any answer: where 5 % of them failed, it is missed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tonle.bench.measure import FailureGroup, Sample, Spread, group_failures, spread
from tonle.bench.report import Environment, read_report
from tonle.telemetry.percentile import percentile

SCHEMA = "tonle.bench.scenarios/1"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to ask the questions."""

    name: str
    use_cache: bool
    concurrency: int

    @property
    def label(self) -> str:
        return self.name


class QuestionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request in a saved report."""

    index: int
    start_s: float  # after the scenario's first request
    latency_s: float
    cache_hit: bool | None
    output_tokens: int
    failure: str | None


class ScenarioResult(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario: what was asked, and what came of it."""

    label: str
    use_cache: bool
    concurrency: int
    requests: int
    repeated: int  # questions that had been asked before in this scenario
    succeeded: int
    failed: int
    duration_s: float  # first request sent to last answer ended
    requests_per_s: float  # answered ones
    latency_s: Spread | None  # of answered requests; None: there are none
    cache_hits: int | None  # None: the target does not say
    output_tokens: int  # of answered requests; 0 if the target does not say
    output_tokens_per_s: float
    meets_sla: bool
    why_not: str | None  # in words, if the SLA is missed
    failures: list[FailureGroup]  # most frequent first
    interrupted: bool
    rows: list[QuestionRow] | None  # only if asked for

    @property
    def cache_hit_rate(self) -> float | None:
        """Of answered requests, from 0 to 1."""
        if self.cache_hits is None:
            return None
        return self.cache_hits / self.succeeded if self.succeeded else 0.0


class ScenarioReport(msgspec.Struct, frozen=True, kw_only=True):
    """The scenarios of one run, one after the other, against one target."""

    schema: str = SCHEMA
    started_at: str  # ISO 8601, UTC
    target: str  # a URL, or the type of the engine that was passed in
    asked_by: str | None  # the path or the method that took the questions; None: stopped before it was known
    model: str | None  # None: not known
    sla_s: float
    seed: int
    settings: dict[str, Any]
    environment: Environment
    scenarios: list[ScenarioResult]
    notes: list[str]
    interrupted: bool

    @property
    def ok(self) -> bool:
        """Every scenario met the SLA and every request was answered."""
        results = self.scenarios
        return bool(results) and not self.interrupted and all(each.meets_sla and not each.failed for each in results)


def summarize(
    scenario: Scenario,
    samples: list[Sample],
    *,
    repeated: int,
    sla_s: float,
    interrupted: bool = False,
    keep_rows: bool = False,
) -> ScenarioResult:
    """Everything a scenario's result says, from its samples."""
    good = [sample for sample in samples if sample.failure is None]
    begin_s = min((sample.start_s for sample in samples), default=0.0)
    duration_s = max((sample.end_s for sample in samples), default=0.0) - begin_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    hits = [sample.cache_hit for sample in good if sample.cache_hit is not None]
    output_tokens = sum(sample.output_tokens for sample in good)
    why_not = _why_not([sample.e2el_s for sample in samples], sla_s)
    return ScenarioResult(
        label=scenario.label,
        use_cache=scenario.use_cache,
        concurrency=scenario.concurrency,
        requests=len(samples),
        repeated=repeated,
        succeeded=len(good),
        failed=len(samples) - len(good),
        duration_s=duration_s,
        requests_per_s=len(good) * per_s,
        latency_s=spread(sample.e2el_s for sample in good),
        cache_hits=sum(hits) if hits else None,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens * per_s,
        meets_sla=why_not is None,
        why_not=why_not,
        failures=group_failures(sample.failure for sample in samples if sample.failure is not None),
        interrupted=interrupted,
        rows=[_row(sample, begin_s) for sample in samples] if keep_rows else None,
    )


def _why_not(latencies_s: list[float | None], sla_s: float) -> str | None:
    """Why the SLA is missed; None if it is met. A latency of None is a failed request."""
    answered = sorted(latency_s for latency_s in latencies_s if latency_s is not None)
    failed = len(latencies_s) - len(answered)
    if not answered:
        return f"none of {len(latencies_s)} requests was answered" if failed else "no request was made"
    p95_s = percentile(answered, 95)
    if p95_s >= sla_s:
        slow = sum(latency_s >= sla_s for latency_s in answered)
        return f"P95 {p95_s:.2f}s ≥ {seconds(sla_s)}: {slow} of {len(answered)} answers too slow"
    ordered = answered + [math.inf] * failed
    slower_s = ordered[math.ceil((len(ordered) - 1) * 95 / 100)]  # of the two that P95 lies between
    if math.isinf(slower_s) or percentile(ordered, 95) >= sla_s:
        return f"{failed} of {len(ordered)} requests failed"
    return None


def seconds(value: float) -> str:
    """2.0s, 0.25s: at least one decimal."""
    return f"{value:.1f}s" if round(value, 1) == value else f"{value:g}s"


def _row(sample: Sample, begin_s: float) -> QuestionRow:
    return QuestionRow(
        index=sample.index,
        start_s=round(sample.start_s - begin_s, 6),
        latency_s=round(sample.end_s - sample.start_s, 6),
        cache_hit=sample.cache_hit,
        output_tokens=sample.output_tokens,
        failure=sample.failure,
    )


def remark(result: ScenarioResult) -> list[str]:
    """What the reader of these numbers should know about them."""
    hits = result.cache_hits
    if hits is None or not result.succeeded or result.interrupted:
        return []
    if not result.use_cache and hits:
        return [f"{result.label}: {hits} answers came from a cache although none was to be used"]
    if result.use_cache and hits > result.repeated:
        return [
            f"{result.label}: {hits} answers came from the cache, but only {result.repeated} questions were repeated: "
            "the others had been answered before this run; use another seed"
        ]
    if result.use_cache and result.repeated and not hits:
        return [
            f"{result.label}: no repeated question was answered from the cache; is the response cache switched off?"
        ]
    return []


def load_scenario_report(path: Path) -> ScenarioReport:
    """Read what `save_report` wrote."""
    return read_report(path, ScenarioReport, "tonle bench scenarios")
