"""The report's tables and sentences: exact numbers of levels, SLOs, failures, GPUs, settings.

Does: sections of HTML, empty where a run has nothing to say. Does not: draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tonle.bench.html.elements import Content, Html, element, joined, table, wide_table
from tonle.bench.kinds.metrics import METRICS as KINDS
from tonle.bench.kinds.metrics import KindMetrics, Quantity
from tonle.bench.level_lines import saturation_line
from tonle.bench.measure import LevelReport, RequestRow
from tonle.bench.numbers import NOTHING, bytes_text, count_text, ms_text, rate_text, share_text
from tonle.bench.report import Run
from tonle.bench.slo import duration_text

NUM_SLOWEST = 12
MAX_CHANGED = 200
MAX_FAILURES = 20  # groups of a level


def headlines(runs: Sequence[Run]) -> Html:
    """The best of each run in a sentence or two."""
    return element("ul", [element("li", _headline(run, many=len(runs) > 1)) for run in runs], class_="headlines")


def _headline(run: Run, *, many: bool) -> Content:
    report = run.report
    name: Content = [element("b", run.name), ": "] if many else None
    answered = [level for level in report.levels if level.succeeded]
    if not answered:
        return [name, "no request was answered." if many else "No request was answered."]
    metrics = report.metrics
    best = max(answered, key=metrics.speed)
    parts: list[Content] = [
        name,
        "highest throughput " if many else "Highest throughput ",
        element("b", f"{rate_text(metrics.speed(best))} {metrics.speed_unit(best)}"),
        f" at {best.label}",
    ]
    latency = metrics.quantities[0]
    if (spread := latency.of(best)) is not None:
        parts.append(f", with a{'n' * (latency.name == 'E2EL')} {latency.name} of {duration_text(spread.p95)} (p95)")
    if best.tpot_ms is not None:
        parts.append(f" and {duration_text(best.tpot_ms.p50)} per token (p50)")
    parts.append(". ")
    judged = [level for level in report.levels if level.slo]
    if judged:
        held = [level for level in judged if level.holds_slo]
        parts.append(
            f"The SLO is held at {', '.join(level.label for level in held)}. "
            if held
            else "The SLO is held at no level. "
        )
    if report.saturation is not None:
        line = saturation_line(report.saturation)
        parts.append(f"{line[0].upper()}{line[1:]}. ")
    failed, requests = sum(level.failed for level in report.levels), sum(level.requests for level in report.levels)
    parts.append(
        f"{count_text(failed)} of {count_text(requests)} requests failed. "
        if failed
        else f"All {count_text(requests)} requests were answered. "
    )
    if report.kind == "simulated":
        parts.append(element("span", "simulated", class_="badge"))
    if report.interrupted:
        parts.append(element("span", "interrupted", class_="badge"))
    return parts


def summaries(runs: Sequence[Run]) -> Html:
    return joined([_summary(run, titled=len(runs) > 1) for run in runs])


def _summary(run: Run, *, titled: bool) -> Html:
    levels, metrics = run.report.levels, run.report.metrics
    letters = any(level.graphemes_per_s is not None for level in levels)
    groups = [
        element("th", quantity.name, colspan=str(len(_columns(quantity))), scope="colgroup", class_="group")
        for quantity in metrics.quantities
    ]
    heads = ("Load", "requests", "failed", "req/s", *(rate.head for rate in metrics.rates))
    first = [element("th", name, rowspan="2", scope="col") for name in heads]
    last = [element("th", "letters/s", rowspan="2", scope="col")] if letters else []
    percents = [
        element("th", text, scope="col", class_="edge" if text == "p50" else None)
        for quantity in metrics.quantities
        for text in _columns(quantity)
    ]
    rows = [_summary_row(level, metrics, letters=letters) for level in levels]
    content = wide_table(
        [element("tr", *first, *groups, *last), element("tr", *percents)],
        rows,
        class_="numbers summary",
        caption=f"Levels of {run.name}, times in milliseconds",
    )
    return joined([element("h3", run.name) if titled else None, content, element("p", _warmup(run), class_="quiet")])


def _columns(quantity: Quantity) -> tuple[str, ...]:
    return ("p50", "min") if quantity.more_is_better else ("p50", "p95", "p99")


def _summary_row(level: LevelReport, metrics: KindMetrics, *, letters: bool) -> list[Content]:
    cells: list[Content] = [
        level.label,
        count_text(level.requests),
        element("b", count_text(level.failed), class_="bad") if level.failed else "0",
        rate_text(level.requests_per_s),
        *(rate_text(rate.of(level)) for rate in metrics.rates),
    ]
    for quantity in metrics.quantities:
        found = quantity.of(level)
        cells += [ms_text(None if found is None else getattr(found, column)) for column in _columns(quantity)]
    return [*cells, rate_text(level.graphemes_per_s)] if letters else cells


def _warmup(run: Run) -> str:
    settings = run.report.settings
    usual = 0 if settings.get("replay") else settings.get("warmup") or 0  # older reports do not say it of each level
    numbers = {level.warmup or usual for level in run.report.levels}
    if run.report.kind == "simulated":
        return "Times in milliseconds. Simulated: no server was asked."
    if not numbers or numbers == {0}:
        return "Times in milliseconds. No warm-up: first requests are counted."
    most = max(numbers)
    return (
        f"Times in milliseconds. Warm-up: {count_text(most)} request{'s' * (most != 1)} before each level, not counted."
    )


def slo_results(runs: Sequence[Run]) -> Html:
    judged = [run for run in runs if any(level.slo for level in run.report.levels)]
    return joined([_slo(run, titled=len(runs) > 1) for run in judged])


def _slo(run: Run, *, titled: bool) -> Html:
    bounds = list(dict.fromkeys(str(result.bound) for level in run.report.levels for result in level.slo))
    rows: list[Sequence[Content]] = []
    for level in run.report.levels:
        results = {str(result.bound): result for result in level.slo}
        cells: list[Content] = [level.label]
        for bound in bounds:
            result = results.get(bound)
            if result is None:
                cells.append(NOTHING)
                continue
            cells.append([result.value_text, " ", _verdict(holds=result.holds)])
        cells += [rate_text(level.goodput_per_s), share_text(level.good_share)]
        rows.append(cells)
    heads = ["Load", *bounds, "goodput/s", "good requests"]
    return joined([
        element("h3", run.name) if titled else None,
        table(heads, rows, class_="numbers", caption=f"SLO of {run.name}"),
    ])  # fmt: skip


def _verdict(*, holds: bool) -> Html:
    return element("span", "✓ held" if holds else "✗ missed", class_="verdict good" if holds else "verdict bad")


def _levels(runs: Sequence[Run]) -> Iterator[tuple[str, LevelReport]]:
    """Every level, with its run's name before it where there are several runs."""
    for run in runs:
        for level in run.report.levels:
            yield (f"{run.name}: {level.label}" if len(runs) > 1 else level.label), level


def slowest_requests(runs: Sequence[Run]) -> Html:
    found = [(name, row) for name, level in _levels(runs) for row in level.rows or [] if row.e2el_ms is not None]
    if not found:
        return Html("")
    found.sort(key=lambda each: -(each[1].e2el_ms or 0))
    metrics = runs[0].report.metrics
    heads = ["Request", "level", "start s", "TTFT", "TPOT", "ITL max", "E2EL", "prompt", "cached", "output tokens"]
    rows = [_request(name, row) for name, row in found[:NUM_SLOWEST]]
    if metrics is not KINDS["chat"]:
        heads = [
            "Request",
            "level",
            "start s",
            *(quantity.name for quantity in metrics.quantities),
            *_contents(metrics),
        ]
        rows = [_kind_request(name, row, metrics) for name, row in found[:NUM_SLOWEST]]
    caption = f"The {len(rows)} requests with the longest E2EL of {count_text(len(found))}, times in milliseconds"
    return joined([table(heads, rows, class_="numbers", caption=caption), element("p", f"{caption}.", class_="quiet")])


def _request(name: str, row: RequestRow) -> list[Content]:
    return [
        f"#{row.index}", name, f"{row.start_s:.2f}", ms_text(row.ttft_ms), ms_text(row.tpot_ms),
        ms_text(max(row.itl_ms, default=None)), ms_text(row.e2el_ms), _count(row.prompt_tokens),
        _count(row.cached_tokens), _count(row.output_tokens),
    ]  # fmt: skip


def _contents(metrics: KindMetrics) -> list[str]:
    """What a request of another kind holds."""
    names = {"items": metrics.items or "items", "prompt_tokens": "tokens", "audio_s": "audio s"}
    return [names[rate.amount] for rate in metrics.rates]


def _kind_request(name: str, row: RequestRow, metrics: KindMetrics) -> list[Content]:
    values = [getattr(row, quantity.field) for quantity in metrics.quantities]
    held = [getattr(row, rate.amount) for rate in metrics.rates]
    texts = [f"{each:.2f}" if isinstance(each, float) else _count(each) for each in held]
    return [f"#{row.index}", name, f"{row.start_s:.2f}", *map(ms_text, values), *texts]


def _count(value: int | None) -> str:
    return NOTHING if value is None else count_text(value)


def changed_answers(runs: Sequence[Run]) -> Html:
    """Of a replay: the records whose answers are not what they were."""
    found = [(name, each) for name, level in _levels(runs) for each in level.changed]
    if not found:
        return Html("")
    rows = [[each.record, name, each.how] for name, each in found[:MAX_CHANGED]]
    rest = f" The first {MAX_CHANGED} are listed." if len(found) > MAX_CHANGED else ""
    replayed = sum(level.requests for run in runs if run.report.settings.get("replay") for level in run.report.levels)
    return joined([
        element("p", f"{count_text(len(found))} of {count_text(replayed)} replayed requests were answered differently.{rest}"),
        table(["Record", "level", "difference"], rows, class_="texts", caption="Changed answers"),
    ])  # fmt: skip


def failures(runs: Sequence[Run]) -> Html:
    rows: list[Sequence[Content]] = [
        [name, count_text(group.count), share_text(group.count / max(1, level.requests)), group.example]
        for name, level in _levels(runs)
        for group in level.failures[:MAX_FAILURES]
    ]
    if not rows:
        return Html("")
    return table(["Level", "requests", "share", "reason (first of its kind)"], rows, class_="texts", caption="Failures")


def gpus(runs: Sequence[Run]) -> Html:
    rows: list[Sequence[Content]] = [
        [
            name,
            gpu.name,
            NOTHING if gpu.utilization is None else f"{gpu.utilization:.0%}",
            f"{bytes_text(gpu.memory_used)} of {bytes_text(gpu.memory_total)}",
            NOTHING if gpu.power_w is None else f"{gpu.power_w:.0f} W",
        ]
        for name, level in _levels(runs)
        for gpu in level.gpus
    ]
    if not rows:
        return element(
            "p", "No GPU was read: there is none on the client's machine, or the run is older.", class_="quiet"
        )
    heads = ["Level", "GPU", "mean utilization", "peak memory", "mean power"]
    return table(heads, rows, class_="numbers", caption="GPUs of the client's machine during each level")


def notes(runs: Sequence[Run]) -> Html:
    found = [(run.name, note) for run in runs for note in run.report.notes]
    found += [
        (run.name, "interrupted: requests still under way are not counted") for run in runs if run.report.interrupted
    ]
    many = len(runs) > 1
    return (
        element("ul", [element("li", f"{name}: {note}" if many else note) for name, note in found])
        if found
        else Html("")
    )


def conditions(runs: Sequence[Run]) -> Html:
    """Target, settings that have a value and the client's machine, runs side by side; rows that differ are marked."""
    facts: list[dict[str, Any]] = []
    for run in runs:
        report, environment = run.report, run.report.environment
        facts.append({
            "kind": report.kind, "requests": report.request_kind, "model": report.model, "server": report.url,
            "started": report.started_at, "prompts": report.prompt_kind,
            **{f"setting {name}": value for name, value in report.settings.items()},
            **{f"client {name}": getattr(environment, name) for name in environment.__struct_fields__},
        })  # fmt: skip
    names = list(dict.fromkeys(name for each in facts for name in each))
    rows: list[Sequence[Content]] = []
    for name in names:
        texts = [_fact(each.get(name)) for each in facts]
        if set(texts) == {NOTHING}:
            continue
        differs = len(set(texts)) > 1
        rows.append([[name, element("span", " ≠", class_="bad", title="differs") if differs else None], *texts])
    heads = ["", *(run.name for run in runs)] if len(runs) > 1 else ["", "value"]
    return table(heads, rows, class_="texts facts", caption="Conditions of the runs")


def _fact(value: Any) -> str:
    if value is None or value in ([], {}, ""):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
