"""`judge`: whether the tuned settings are better than the default by more than chance, from the fresh confirmation alone.

Does: compare the two with bootstrap intervals (`bench/compare.py`), say it in a sentence. Does not: measure.

The measurements of the search do not count here: the best of many is in part the luckiest of many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tonle.bench.compare import Change, CompareOptions, Comparison, compare
from tonle.bench.compare_side import PERCENTS
from tonle.bench.numbers import change_text
from tonle.bench.report import Run
from tonle.tune.objective import Goal, Outcome, outcome_of
from tonle.tune.state import Measurement

CONFIDENCE = 0.95
_ENOUGH_GOOD = 10  # good requests against none at all: no accident


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    is_better: bool  # tuned, than the default
    reason: str
    sentence: str  # "default → tuned: …", or "default → best other: …"
    default: Outcome
    tuned: Outcome
    changes: list[Change]
    method: str

    @property
    def best(self) -> Outcome:
        return self.tuned if self.is_better else self.default


def judge(default: Sequence[Measurement], tuned: Sequence[Measurement], goal: Goal) -> Verdict:
    """Of the runs of the confirmation."""
    outcomes = [outcome_of([run.level for run in runs], goal.slo) for runs in (default, tuned)]
    comparison = compare(
        [_named(run) for run in default],
        [_named(run) for run in tuned],
        CompareOptions(tolerance=0.0, confidence=CONFIDENCE, percents=_percents(goal), force=True),
    )
    changes = _shown(comparison, goal)
    is_better, reason = _decide(changes, outcomes[0], outcomes[1], goal)
    return Verdict(
        is_better=is_better,
        reason=reason,
        sentence=_sentence("tuned" if is_better else "best other", changes, outcomes[0], outcomes[1]),
        default=outcomes[0],
        tuned=outcomes[1],
        changes=changes,
        method=comparison.method,
    )


def _percents(goal: Goal) -> tuple[float, ...]:
    return tuple(sorted({*PERCENTS, *(bound.percent for bound in goal.slo.bounds)}))


def _named(run: Measurement) -> Run:
    return Run("run" if run.path is None else run.path.name, run.report)


def _shown(comparison: Comparison, goal: Goal) -> list[Change]:
    """What the SLO names, then throughput and goodput; TTFT and ITL where there is no SLO."""
    named = [f"{bound.metric.upper()} p{bound.percent:g}" for bound in goal.slo.bounds] or ["TTFT p95", "ITL p99"]
    wanted = [*named, "output tok/s", *(["goodput/s"] if goal.slo else [])]
    found = {change.metric: change for change in comparison.levels[0].changes}
    return [found[name] for name in wanted if name in found]


def _decide(changes: Sequence[Change], default: Outcome, tuned: Outcome, goal: Goal) -> tuple[bool, str]:
    by_name = {change.metric: change for change in changes}
    if tuned.holds and not default.holds:
        missed = [
            by_name.get(f"{each.bound.metric.upper()} p{each.bound.percent:g}")
            for each in default.bounds
            if not each.holds
        ]
        if missed and all(change is not None and change.high is not None and change.high < 0 for change in missed):
            return True, "they hold the SLO, which the default misses, and the difference is larger than chance"
    name = "output tok/s" if goal.maximize == "throughput" else "goodput/s"
    rises = _rises(by_name.get(name), default, tuned)
    what = "throughput" if goal.maximize == "throughput" else "goodput"
    if default.holds and not tuned.holds:
        return False, "the default holds the SLO, and they miss it"
    if rises:
        held = "" if tuned.holds or not goal.slo else ", although neither holds the SLO"
        return True, f"their {what} is higher by more than chance{held}"
    if tuned.holds and not default.holds:
        return False, "they hold the SLO and the default misses it, but the difference may be chance"
    neither = "" if default.holds or not goal.slo else ", and neither holds the SLO"
    return False, f"their {what} is not higher than the default's by more than chance{neither}"


def _rises(change: Change | None, default: Outcome, tuned: Outcome) -> bool:
    if change is not None and change.low is not None:
        return change.low > 0
    if change is not None and change.metric == "goodput/s":  # the default has no good request: no ratio
        good = (tuned.good_share or 0.0) * tuned.requests
        return not default.good_share and good >= _ENOUGH_GOOD
    return False


def _sentence(other: str, changes: Sequence[Change], default: Outcome, tuned: Outcome) -> str:
    parts = []
    for change in changes:
        name = "throughput" if change.metric == "output tok/s" else change.metric.replace("goodput/s", "goodput")
        if change.change is None and change.a == 0 and change.b:
            parts.append(f"{name} from 0 to {change.b:.3g}/s")
            continue
        text = f"{name} {change_text(change.change)}"
        if change.low is not None and change.high is not None and math.isfinite(change.high):
            text += f" [{change_text(change.low)}, {change_text(change.high)}]"
        parts.append(text)
    runs = f"{default.runs} runs each, {default.requests} and {tuned.requests} requests, interleaved"
    return f"default → {other}: {', '.join(parts)}, measured ({runs}; {CONFIDENCE:.0%} intervals)"
