"""Reports for other programs: Markdown for a CI job's summary, CSV with one row per level or per request.

Does: text. Does not: write files. Numbers in CSV are not rounded; times are in milliseconds.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from tonle.bench.measure import LevelReport, RequestRow, spread
from tonle.bench.numbers import count_text, ms_text, rate_text, share_text
from tonle.bench.report import Run
from tonle.bench.slo import METRICS
from tonle.bench.tables import failure_lines

SPREAD_FIELDS = ("mean", "p50", "p90", "p95", "p99", "min", "max", "count")
LEVEL_FIELDS = (
    "label", "concurrency", "rate", "requests", "succeeded", "failed", "duration_s", "requests_per_s", "output_tokens_per_s",
    "total_tokens_per_s", "prompt_tokens", "cached_tokens", "output_tokens", "goodput_per_s", "good_share", "graphemes_per_s",
    "warmup", "client_cpu_share", "max_send_delay_ms", "reconnects", "interrupted",
)  # fmt: skip
ROW_FIELDS = tuple(name for name in RequestRow.__struct_fields__ if name != "itl_ms")


def levels_csv(runs: Sequence[Run]) -> str:
    """One row per level: counts, rates, every percentile, whether the SLO holds."""
    heads = ["run", "kind", "model", *LEVEL_FIELDS, *(f"{metric}_ms_{name}" for metric in METRICS for name in SPREAD_FIELDS),
             "slo_held", "gpu_utilization", "gpu_memory_used"]  # fmt: skip
    return _csv(heads, [_level_cells(run, level) for run in runs for level in run.report.levels])


def _level_cells(run: Run, level: LevelReport) -> list[Any]:
    cells: list[Any] = [run.name, run.report.kind, run.report.model]
    cells += [getattr(level, name) for name in LEVEL_FIELDS]
    for metric in METRICS:
        found = getattr(level, f"{metric}_ms")
        cells += [None if found is None else getattr(found, name) for name in SPREAD_FIELDS]
    used = [gpu.utilization for gpu in level.gpus if gpu.utilization is not None]
    memory = [gpu.memory_used for gpu in level.gpus if gpu.memory_used is not None]
    held = all(result.holds for result in level.slo) if level.slo else None
    return [*cells, held, sum(used) / len(used) if used else None, sum(memory) if memory else None]


def requests_csv(runs: Sequence[Run]) -> str:
    """One row per request; of the gaps between its tokens, how many there were and their percentiles."""
    heads = ["run", "level", *ROW_FIELDS, "itl_count", "itl_ms_p50", "itl_ms_p99", "itl_ms_max"]
    rows = [
        [run.name, level.label, *(getattr(row, name) for name in ROW_FIELDS), *_gaps(row)]
        for run in runs
        for level in run.report.levels
        for row in level.rows or []
    ]
    return _csv(heads, rows)


def _gaps(row: RequestRow) -> list[Any]:
    found = spread(row.itl_ms)
    return [0, None, None, None] if found is None else [found.count, found.p50, found.p99, found.max]


def _csv(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    """A text that a spreadsheet would run as a formula gets a quote in front: failures hold what servers say."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def markdown(runs: Sequence[Run]) -> str:
    """A table of levels per run, then its SLO, failures and notes."""
    return "\n".join(line for run in runs for line in _run_lines(run))


def _run_lines(run: Run) -> list[str]:
    report = run.report
    goodput = any(level.goodput_per_s is not None for level in report.levels)
    heads = ["load", "requests", "failed", "req/s", "out tok/s", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "ITL p50", "p99",
             "E2EL p50", "p99", *(["goodput/s", "SLO"] if goodput else [])]  # fmt: skip
    lines = [
        f"## {_escape(run.name)}",
        "",
        f"{_escape(str(report.model))} at {_escape(report.url)}, {report.started_at}, {report.kind}. Times in milliseconds.",
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'--:|' * (len(heads) - 1)}",
    ]
    lines += [f"| {' | '.join(_level_row(level, goodput=goodput))} |" for level in report.levels]
    ends = [
        *(f"{level.label}: {result}" for level in report.levels for result in level.slo),
        *(f"{level.label}: {text}" for level in report.levels for text in failure_lines(level.failures)),
        *report.notes,
        *(["interrupted: requests still under way are not counted"] if report.interrupted else []),
    ]
    return [*lines, "", *(f"- {_escape(text)}" for text in ends), *([""] if ends else [])]


def _level_row(level: LevelReport, *, goodput: bool) -> list[str]:
    cells = [
        _escape(level.label),
        count_text(level.requests),
        count_text(level.failed),
        rate_text(level.requests_per_s),
        rate_text(level.output_tokens_per_s),
    ]
    for metric, percents in (("ttft", (50, 95, 99)), ("tpot", (50, 95)), ("itl", (50, 99)), ("e2el", (50, 99))):
        found = getattr(level, f"{metric}_ms")
        cells += [ms_text(None if found is None else getattr(found, f"p{percent}")) for percent in percents]
    if goodput:
        held = all(result.holds for result in level.slo)
        cells += [f"{rate_text(level.goodput_per_s)} ({share_text(level.good_share)})", "held" if held else "missed"]
    return cells


def _escape(text: str) -> str:
    """A text from a report, as itself: no markup of Markdown or HTML."""
    flat = " ".join(text.split())
    for mark in "\\`*_[]<>|#":
        flat = flat.replace(mark, f"\\{mark}")
    return flat
