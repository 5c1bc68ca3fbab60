"""The numbers of the comparison: columns, medians over repeats, ratios to the best peer, targets.

Does: pure functions from runs to scores and verdicts. Does not: print or measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

from tonle.bench import LevelReport

# As it comes, with 8-bit activations, keys and values, as OpenVINO's int8; without speculative decoding, which peers lack; exact
# activations, keys and values; and float32 keys and values beside 8-bit activations.
OURS = ("tonle", "tonle-no-guesses", "tonle-16bit", "tonle-float32-kv")
MEMORY_LEVEL = "16"
GB = 1e9

Verdict = Literal["PASS", "MISS", "no peer", "not measured"]


class LevelRun(msgspec.Struct, frozen=True, kw_only=True):
    """One level of one run."""

    report: LevelReport
    peak_rss_bytes: int
    doubts: list[str]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One server, started once and driven through the levels."""

    server: str
    repeat: int
    command: list[str]
    ready_s: float
    first_answer_s: float  # from the start of the process, too: what "ready" is worth
    answer: str
    levels: dict[str, LevelRun]


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a run, and what ours is to be."""

    name: str
    title: str
    unit: str
    level: str | None  # None: about the start
    lower_is_better: bool = False
    max_ratio: float | None = None  # to the best peer
    min_ratio: float | None = None
    max_value: float | None = None  # whatever the peers have


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A column's median over the repeats of one server."""

    median: float
    low: float
    high: float
    count: int

    @property
    def spread(self) -> float:
        """Half of the range, as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the verdict. None = not measured."""

    server: str
    column: str
    ours: float | None
    best_peer: str | None
    best: float | None
    ratio: float | None  # ours to the best peer's
    target: str
    verdict: Verdict


COLUMNS = (
    Column(name="start", title="start to ready", unit="s", level=None, lower_is_better=True, max_value=5.0),
    Column(name="ttft", title="1 user TTFT", unit="ms", level="1", lower_is_better=True, max_ratio=1.0),
    Column(name="tpot", title="1 user TPOT", unit="ms", level="1", lower_is_better=True, max_ratio=0.7),
    Column(name="1", title="1 user", unit="tok/s", level="1", min_ratio=1.4),
    Column(name="4", title="4 users", unit="tok/s", level="4", min_ratio=1.3),
    Column(name="16", title="16 users", unit="tok/s", level="16", min_ratio=1.15),
    Column(name="32", title="32 users", unit="tok/s", level="32", min_ratio=1.15),
    Column(name="shared", title="512 shared, 8 users", unit="tok/s", level="shared", min_ratio=1.2),
    Column(name="rss", title="peak RSS, 16 users", unit="GB", level=MEMORY_LEVEL, lower_is_better=True, max_value=1.5),
)

Scores = Mapping[str, Mapping[str, Score]]  # server → column → score


def read(column: Column, run: Run) -> float | None:
    """The column's number in one run; None if its level was left out or had failures."""
    if column.level is None:
        return run.ready_s
    level = run.levels.get(column.level)
    if level is None or level.report.failed or not level.report.succeeded:
        return None
    match column.name:
        case "ttft":
            return level.report.ttft_ms.p50 if level.report.ttft_ms else None
        case "tpot":
            return level.report.tpot_ms.p50 if level.report.tpot_ms else None
        case "rss":
            return level.peak_rss_bytes / GB
        case _:
            return level.report.output_tokens_per_s


def score(runs: Sequence[Run]) -> Scores:
    """Medians per server and column, over the runs in which the number is there."""
    table: dict[str, dict[str, Score]] = {}
    for server in dict.fromkeys(run.server for run in runs):
        row = table[server] = {}
        for column in COLUMNS:
            numbers = [number for run in runs if run.server == server and (number := read(column, run)) is not None]
            if numbers:
                row[column.name] = Score(
                    median=median(numbers), low=min(numbers), high=max(numbers), count=len(numbers)
                )
    return table


def compare_prompts(runs: Sequence[Run]) -> list[str]:
    """Levels in which the servers did not count the same prompt tokens: then they did not get the same prompts."""
    remarks = []
    for level in dict.fromkeys(name for run in runs for name in run.levels):
        counts = {run.server: _prompt_tokens(run.levels[level].report) for run in runs if level in run.levels}
        if len(set(counts.values()) - {None}) > 1:
            text = ", ".join(f"{server} {count:.2f}" for server, count in counts.items() if count is not None)
            remarks.append(f"level {level}: prompt tokens per request differ: {text}")
    return remarks


def _prompt_tokens(report: LevelReport) -> float | None:
    if report.prompt_tokens is None or not report.succeeded:
        return None
    return report.prompt_tokens / report.succeeded


def judge(scores: Scores) -> list[Judgement]:
    """Each of ours against the best peer of each column."""
    return [_judge_column(column, name, scores) for name in OURS if name in scores for column in COLUMNS]


def _judge_column(column: Column, server: str, scores: Scores) -> Judgement:
    ours = scores[server].get(column.name)
    peers = [(name, row[column.name].median) for name, row in scores.items() if name not in OURS and column.name in row]
    best_peer, best = _best(column, peers)
    ratio = ours.median / best if ours is not None and best else None
    return Judgement(
        server=server,
        column=column.name,
        ours=None if ours is None else ours.median,
        best_peer=best_peer,
        best=best,
        ratio=ratio,
        target=target_text(column),
        verdict=_verdict(column, None if ours is None else ours.median, ratio),
    )


def _best(column: Column, peers: Iterable[tuple[str, float]]) -> tuple[str | None, float | None]:
    ranked = sorted(peers, key=lambda peer: peer[1], reverse=not column.lower_is_better)
    return ranked[0] if ranked else (None, None)


def _verdict(column: Column, ours: float | None, ratio: float | None) -> Verdict:
    if ours is None:
        return "not measured"
    if column.max_value is not None:
        return "PASS" if ours <= column.max_value else "MISS"
    if ratio is None:
        return "no peer"
    if column.max_ratio is not None:
        return "PASS" if ratio <= column.max_ratio else "MISS"
    return "PASS" if ratio >= (column.min_ratio or 0.0) else "MISS"


def target_text(column: Column) -> str:
    if column.max_value is not None:
        return f"≤ {column.max_value:g} {column.unit}"
    if column.max_ratio is not None:
        return f"≤ {column.max_ratio:g}×"
    return f"≥ {column.min_ratio:g}×"
