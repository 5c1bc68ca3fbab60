"""Reports for other programs: Markdown for a CI job's summary, CSV with one row per level or per request.

Does: text. Does not: write files. Numbers in CSV are not rounded; times are in milliseconds.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from tonle.bench.kinds.metrics import METRICS, KindMetrics
from tonle.bench.measure import LevelReport, RequestRow, spread
from tonle.bench.numbers import count_text, ms_text, rate_text, share_text
from tonle.bench.report import Run, one_kind
from tonle.bench.tables import failure_lines

SPREAD_FIELDS = ("mean", "p50", "p90", "p95", "p99", "min", "max", "count")
ALL_FIELDS = ("label", "concurrency", "rate", "requests", "succeeded", "failed", "duration_s", "requests_per_s")
CHAT_FIELDS = (
    "output_tokens_per_s", "total_tokens_per_s", "prompt_tokens", "cached_tokens", "output_tokens", "goodput_per_s", "good_share",
    "graphemes_per_s",
)  # fmt: skip
LAST_FIELDS = ("warmup", "client_cpu_share", "max_send_delay_ms", "reconnects", "interrupted")
CHAT_ROW_FIELDS = tuple(name for name in RequestRow.__struct_fields__ if name not in ("itl_ms", "items", "audio_s"))


def levels_csv(runs: Sequence[Run]) -> str:
    """One row per level: counts, rates, every percentile, whether the SLO holds. All runs are of one kind of requests."""
    metrics = METRICS[one_kind(runs, "put into one table")]
    names = _level_fields(metrics)
    heads = ["run", "kind", "model", *names,
             *(f"{quantity.field}_{name}" for quantity in metrics.quantities for name in SPREAD_FIELDS),
             "slo_held", "gpu_utilization", "gpu_memory_used"]  # fmt: skip
    return _csv(heads, [_level_cells(run, level, names) for run in runs for level in run.report.levels])


def _level_fields(metrics: KindMetrics) -> tuple[str, ...]:
    if metrics is METRICS["chat"]:
        return (*ALL_FIELDS, *CHAT_FIELDS, *LAST_FIELDS)
    own = [name for rate in metrics.rates for name in (rate.field, rate.total)]
    return (*ALL_FIELDS, *own, "goodput_per_s", "good_share", *LAST_FIELDS)


def _level_cells(run: Run, level: LevelReport, names: Sequence[str]) -> list[Any]:
    metrics = run.report.metrics
    unknown = {rate.field for rate in metrics.rates if rate.of(level) is None}
    cells: list[Any] = [run.name, run.report.kind, run.report.model]
    cells += [None if name in unknown else getattr(level, name) for name in names]
    for quantity in metrics.quantities:
        found = quantity.of(level)
        cells += [None if found is None else getattr(found, name) for name in SPREAD_FIELDS]
    held = level.holds_slo if level.slo else None
    return [*cells, held, level.gpu_use, level.gpu_memory]


def requests_csv(runs: Sequence[Run]) -> str:
    """One row per request; of the gaps between its tokens, how many there were and their percentiles."""
    metrics = METRICS[one_kind(runs, "put into one table")]
    is_chat = metrics is METRICS["chat"]
    names = CHAT_ROW_FIELDS if is_chat else _row_fields(metrics)
    heads = ["run", "level", *names, *(["itl_count", "itl_ms_p50", "itl_ms_p99", "itl_ms_max"] if is_chat else [])]
    rows = [
        [run.name, level.label, *(getattr(row, name) for name in names), *(_gaps(row) if is_chat else [])]
        for run in runs
        for level in run.report.levels
        for row in level.rows or []
    ]
    return _csv(heads, rows)


def _row_fields(metrics: KindMetrics) -> tuple[str, ...]:
    own = [quantity.field for quantity in metrics.quantities] + [rate.amount for rate in metrics.rates]
    return ("index", "start_s", "delay_ms", *own, "good", "failure")


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
    metrics = report.metrics
    heads = ["load", "requests", "failed", "req/s", *(rate.head for rate in metrics.rates)]
    for quantity in metrics.quantities:
        heads += [f"{quantity.name} {quantity.many[0]}", *quantity.many[1:]]
    heads += ["goodput/s", "SLO"] if goodput else []
    kind = "" if report.request_kind == "chat" else f"{report.request_kind} by "
    times = "Times in milliseconds" if metrics.times == metrics.quantities else "Latencies in milliseconds"
    lines = [
        f"## {_escape(run.name)}",
        "",
        f"{kind}{_escape(str(report.model))} at {_escape(report.url)}, {report.started_at}, {report.kind}. {times}.",
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'--:|' * (len(heads) - 1)}",
    ]
    lines += [f"| {' | '.join(_level_row(level, metrics, goodput=goodput))} |" for level in report.levels]
    ends = [
        *(f"{level.label}: {result}" for level in report.levels for result in level.slo),
        *(f"{level.label}: {text}" for level in report.levels for text in failure_lines(level.failures)),
        *report.notes,
        *(["interrupted: requests still under way are not counted"] if report.interrupted else []),
    ]
    return [*lines, "", *(f"- {_escape(text)}" for text in ends), *([""] if ends else [])]


def _level_row(level: LevelReport, metrics: KindMetrics, *, goodput: bool) -> list[str]:
    cells = [
        _escape(level.label),
        count_text(level.requests),
        count_text(level.failed),
        rate_text(level.requests_per_s),
        *(rate_text(rate.of(level)) for rate in metrics.rates),
    ]
    for quantity in metrics.quantities:
        found = quantity.of(level)
        cells += [ms_text(None if found is None else getattr(found, column)) for column in quantity.many]
    if goodput:
        held = "held" if level.holds_slo else "missed"
        cells += [f"{rate_text(level.goodput_per_s)} ({share_text(level.good_share)})", held]
    return cells


def _escape(text: str) -> str:
    """A text from a report, as itself: no markup of Markdown or HTML."""
    flat = " ".join(text.split())
    for mark in "\\`*_[]<>|#":
        flat = flat.replace(mark, f"\\{mark}")
    return flat
