"""`compare`: what changed from runs A to runs B, level by level, each number with a bootstrap confidence interval.

Does: match levels by their load, refuse runs of different workloads, judge each difference against a tolerance.
Does not: read files or print (`cli/bench_report.py`, `compare_tables.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from tonle.bench.bootstrap import draw_counts, interval
from tonle.bench.compare_side import PERCENTS, Better, Estimate, Side, Unit
from tonle.bench.report import Run, one_kind
from tonle.errors import ConfigError

Verdict = Literal[
    "regression", "improvement", "within tolerance", "no change", "no evidence", "too few requests", "no interval"
]

RESAMPLES = 2000
MIN_RESAMPLES = 400  # enough for an interval of 99 %
MAX_DRAWN = 50_000_000  # requests of a level in all its resamples, of eight bytes each: what fits into memory
MAX_LENGTH_RATIO = 1.1  # of mean tokens per request; further apart it is not the same work, unless
MAX_STANDARD_ERRORS = 4  # explain it: lengths are drawn at random
# Settings that may differ between runs of one workload. All others are part of it. Loads are told apart by levels' labels.
NOT_WORKLOAD = {
    "url", "model", "verify_tls", "concurrency", "rates", "ramp", "sweep", "max_levels", "arrivals", "burstiness", "requests",
    "duration_s", "warmup", "timeout_s", "processes", "slo", "seed", "graphemes", "keep_requests",
}  # fmt: skip


# What a request holds: in words, its field, its unit, digits to show.
_LENGTHS = (
    ("prompts", "prompt_tokens", "tokens", 0),
    ("outputs", "output_tokens", "tokens", 0),
    ("requests", "items", "items", 1),
    ("sounds", "audio_s", "seconds", 1),
)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a level in A and in B. `change` is relative to A; of a share (`unit`) it is the difference."""

    metric: str
    unit: Unit
    better: Better
    a: float | None
    b: float | None
    change: float | None  # None: there is nothing to relate it to
    low: float | None = None  # ends of the interval
    high: float | None = None
    verdict: Verdict


class LevelComparison(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    requests_a: int
    requests_b: int
    paired: bool  # A and B sent the same prompts: a request is drawn together with its counterpart
    changes: list[Change]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All levels that A and B have in common."""

    schema: str = "tonle.bench.comparison/1"
    a: list[str]  # names of the runs
    b: list[str]
    tolerance: float
    confidence: float
    resamples: int
    seed: int
    method: str
    levels: list[LevelComparison]
    notes: list[str]

    def changes(self, verdict: Verdict) -> list[tuple[str, Change]]:
        """Those judged so, each with its level's label."""
        return [(level.label, each) for level in self.levels for each in level.changes if each.verdict == verdict]


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    tolerance: float = 0.05  # a smaller change is no regression
    confidence: float = (
        0.99  # of each interval: with dozens of numbers, 95 % would give a false alarm in every other comparison
    )
    resamples: int = RESAMPLES  # fewer for very many requests: `MAX_DRAWN`
    percents: tuple[float, ...] = PERCENTS  # of latencies
    seed: int = 0
    force: bool = False  # compare different workloads, and runs without rows


def compare(a: Sequence[Run], b: Sequence[Run], options: CompareOptions | None = None) -> Comparison:
    """Compare runs A with runs B. Raises `ConfigError` for runs that cannot be compared, unless `force` is set."""
    one_kind([*a, *b], "compared")
    options = _within_memory(options or CompareOptions(), (*a, *b))
    labels = [level.label for level in a[0].report.levels if all(run.level(level.label) for run in (*a, *b))]
    if not labels:
        raise ConfigError(f"A and B have no level in common: A has {_labels(a)}; B has {_labels(b)}", param="runs")
    problems = [*_different_settings([*a, *b]), *_different_lengths(labels, a, b), *_without_rows(labels, [*a, *b])]
    if problems and not options.force:
        raise ConfigError(f"these runs cannot be compared: {'; '.join(problems)}. --force compares them nevertheless",
                          param="runs")  # fmt: skip
    rng = np.random.default_rng(options.seed)
    return Comparison(
        a=[run.name for run in a],
        b=[run.name for run in b],
        tolerance=options.tolerance,
        confidence=options.confidence,
        resamples=options.resamples,
        seed=options.seed,
        method=_method(a, b, options),
        levels=[_compare_level(label, a, b, options, rng) for label in labels],
        notes=[*(f"compared nevertheless: {text}" for text in problems), *_notes(a, b, labels)],
    )


def _within_memory(options: CompareOptions, runs: Sequence[Run]) -> CompareOptions:
    """With fewer resamples, where runs have a hundred thousand requests: their intervals are narrow anyway."""
    most = max((level.requests for run in runs for level in run.report.levels), default=0) * len(runs)
    resamples = min(options.resamples, max(MIN_RESAMPLES, MAX_DRAWN // max(1, most)))
    return msgspec.structs.replace(options, resamples=resamples)


def _compare_level(
    label: str, a: Sequence[Run], b: Sequence[Run], options: CompareOptions, rng: np.random.Generator
) -> LevelComparison:
    kind = a[0].report.request_kind
    before, after = (
        Side([level for run in runs if (level := run.level(label))], options.percents, kind) for runs in (a, b)
    )
    paired = before.sends_the_same_as(after)
    counts = draw_counts(rng, before.sizes, options.resamples)
    estimates = before.estimates(counts, rng)
    others = after.estimates(counts if paired else draw_counts(rng, after.sizes, options.resamples), rng)
    if before.bounds != after.bounds:
        others.pop("goodput/s", None)
    return LevelComparison(
        label=label,
        requests_a=before.requests,
        requests_b=after.requests,
        paired=paired,
        changes=[_change(name, each, others[name], options) for name, each in estimates.items() if name in others],
    )


def _change(metric: str, a: Estimate, b: Estimate, options: CompareOptions) -> Change:
    change = ends = None
    if a.value is not None and b.value is not None:
        if a.unit == "share":
            change = b.value - a.value
        elif a.value:
            change = b.value / a.value - 1
    if change is not None and a.resampled is not None and b.resampled is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = b.resampled - a.resampled if a.unit == "share" else b.resampled / a.resampled - 1
        ends = interval(drawn, options.confidence)
    return Change(
        metric=metric,
        unit=a.unit,
        better=a.better,
        a=a.value,
        b=b.value,
        change=change,
        low=None if ends is None else ends[0],
        high=None if ends is None else ends[1],
        verdict=_verdict(change, ends, a, b, options),
    )


def _verdict(
    change: float | None, ends: tuple[float, float] | None, a: Estimate, b: Estimate, options: CompareOptions
) -> Verdict:
    if a.resampled is None or b.resampled is None:
        return "no interval"
    if change is None or ends is None or not (a.enough and b.enough):
        return "too few requests"
    if change == 0 and ends == (0, 0):
        return "no change"
    if ends[0] <= 0 <= ends[1]:
        return "no evidence"
    # Failures are not tolerated: one more is a regression as soon as it is no accident.
    if abs(change) <= (0 if a.unit == "share" else options.tolerance):
        return "within tolerance"
    return "improvement" if (change < 0) == (a.better == "lower") else "regression"


def _labels(runs: Sequence[Run]) -> str:
    return ", ".join(dict.fromkeys(level.label for run in runs for level in run.report.levels)) or "none"


def _different_settings(runs: Sequence[Run]) -> Iterator[str]:
    """Settings of the workload that not all runs share. One that a run does not name is not held against it."""
    first = runs[0]
    for run in runs[1:]:
        mine, theirs = first.report.settings, run.report.settings
        for name in sorted(mine.keys() & theirs.keys() - NOT_WORKLOAD):
            if mine[name] != theirs[name]:
                yield f"{name} is {_value(mine[name])} in {first.name} and {_value(theirs[name])} in {run.name}"


def _value(value: object) -> str:
    return "not set" if value is None else str(value)


def _different_lengths(labels: list[str], a: Sequence[Run], b: Sequence[Run]) -> Iterator[str]:
    """What was really sent and received may differ although the settings agree; random lengths differ a little."""
    for label in labels:
        for what, field, unit, digits in _LENGTHS:
            if field == "audio_s" and a[0].report.request_kind == "tts":  # it is what servers differ in
                continue
            (mean_a, error_a), (mean_b, error_b) = (_mean(runs, label, field) for runs in (a, b))
            by_chance = MAX_STANDARD_ERRORS * math.hypot(error_a, error_b)
            far = max(mean_a, mean_b) > MAX_LENGTH_RATIO * min(mean_a, mean_b) > 0
            if far and abs(mean_a - mean_b) > by_chance:
                yield f"{label}: {what} have {mean_a:.{digits}f} {unit} on average in A and {mean_b:.{digits}f} in B"


def _mean(runs: Sequence[Run], label: str, field: str) -> tuple[float, float]:
    """Of a field, such as tokens, per answered request; and the standard error of that, 0 where it is not known."""
    levels = [level for run in runs if (level := run.level(label))]
    mean = sum(getattr(level, field) or 0 for level in levels) / max(1, sum(level.succeeded for level in levels))
    rows = [row for level in levels for row in level.rows or [] if row.failure is None]
    counts = [count for row in rows if (count := getattr(row, field)) is not None]
    return mean, float(np.std(counts)) / math.sqrt(len(counts)) if len(counts) > 1 else 0.0


def _without_rows(labels: list[str], runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if any(level.rows is None for label in labels if (level := run.level(label))):
            yield f"{run.name} has no rows of single requests, which intervals are computed from"


def _notes(a: Sequence[Run], b: Sequence[Run], labels: list[str]) -> Iterator[str]:
    for side, runs in (("A", a), ("B", b)):
        rest = [
            label
            for label in dict.fromkeys(each.label for run in runs for each in run.report.levels)
            if label not in labels
        ]
        if rest:
            yield f"only in {side}, not compared: {', '.join(rest)}"
        if any(run.report.interrupted for run in runs):
            yield f"{side} was interrupted"
        if any(run.report.kind == "simulated" for run in runs):
            yield f"{side} was simulated, not measured"
    for what, names in (
        ("models", {run.report.model for run in (*a, *b)}),
        ("clients' machines", {run.report.environment.platform for run in (*a, *b)}),
    ):
        if len(names) > 1:
            yield f"the {what} differ: {', '.join(sorted(map(str, names)))}"
    bounds = {tuple(str(each.bound) for each in level.slo) for run in (*a, *b) if (level := run.level(labels[0]))}
    if len(bounds) > 1:
        yield "goodput is not compared: the SLOs differ"
    if len(a) == len(b) == 1:
        yield "one run each: intervals say nothing of what differs from one run to the next, such as other load on the machine"


def _method(a: Sequence[Run], b: Sequence[Run], options: CompareOptions) -> str:
    gaps = "; ITL by requests, not by single gaps" if a[0].report.request_kind == "chat" else ""
    several = " Runs are drawn first, one fewer than there are." if max(len(a), len(b)) > 1 else ""
    return (
        f"{100 * options.confidence:g} % bootstrap intervals (percentile method, {options.resamples} resamples of whole "
        f"requests, seed {options.seed}){gaps}.{several} A regression is a change for the worse "
        f"of more than {100 * options.tolerance:g} % whose interval does not contain 0, and any such rise of failures."
    )
