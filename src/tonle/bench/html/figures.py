"""The report's figures: which series stand in a chart, their legend, and the data that the script draws from.

Does: choose and arrange. Does not: compute (`series.py`) or draw (`charts.py`, `script.js`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tonle.bench.html.charts import (
    NUM_COLORS,
    Distribution,
    Path,
    Point,
    Style,
    distribution_chart,
    key_mark,
    point_details,
    tradeoff_chart,
)
from tonle.bench.html.elements import Html, element, joined
from tonle.bench.html.series import MAX_LANES, PERCENTS, quantiles, timeline, values_of
from tonle.bench.kinds.metrics import KindMetrics, Quantity
from tonle.bench.numbers import count_text, rate_text
from tonle.bench.report import Run

TRADEOFF_PERCENTS = ("p50", "p95", "p99")
MAX_SHOWN_LEVELS = 6  # of a distribution chart at first; the others can be switched on
THINNED = (
    f"Of a level with more than {MAX_LANES} requests, those that failed, the slowest and every so-manyth of the others "
    "have a bar."
)
NO_ROWS = "was saved without its single requests, so that this is missing. `tonle bench --json` saves them by default."


class Legend:
    """Owns the names and looks of levels and runs."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.labels = list(dict.fromkeys(level.label for run in runs for level in run.report.levels))

    def style(self, run: int, label: str) -> Style:
        """Levels have colors and shapes, runs have dashes; a single level leaves the colors to the runs."""
        if len(self.labels) == 1:
            return self.run_style(run)
        place = self.labels.index(label)
        return Style(_color(place, len(self.labels)), run, place)

    def run_style(self, run: int) -> Style:
        return Style(_color(run, len(self.runs)), run, run)

    def shown(self, label: str) -> bool:
        """At first: all, or some of many, the first and the last among them."""
        count = len(self.labels)
        if count <= MAX_SHOWN_LEVELS:
            return True
        chosen = {round(place * (count - 1) / (MAX_SHOWN_LEVELS - 1)) for place in range(MAX_SHOWN_LEVELS)}
        return self.labels.index(label) in chosen


def _color(place: int, count: int) -> int:
    """Spread over the colors, cold to warm."""
    return (
        1
        if count == 1
        else round(place * (NUM_COLORS - 1) / max(count - 1, 1))
        if count <= NUM_COLORS
        else place % NUM_COLORS
    )


def distributions(runs: Sequence[Run]) -> Html:
    legend = Legend(runs)
    figures = []
    for quantity in _metrics(runs).times:
        lines = _distribution_lines(runs, legend, quantity)
        if lines:
            title = quantity.title
            figures.append(_figure(title, distribution_chart(title, lines), name=quantity.field.removesuffix("_ms")))
    return joined(
        [
            _missing(runs),
            _switches(legend) if figures else None,
            element("div", *figures, class_="charts") if figures else None,
        ]
    )


def _metrics(runs: Sequence[Run]) -> KindMetrics:
    """All runs of a page are of one kind of requests."""
    return runs[0].report.metrics


def _distribution_lines(runs: Sequence[Run], legend: Legend, quantity: Quantity) -> list[Distribution]:
    lines = []
    for number, run in enumerate(runs):
        for level in run.report.levels:
            found = quantiles(values_of(level, quantity))
            if found is not None:
                name = f"{run.name}, {level.label}" if len(runs) > 1 else level.label
                key = f"{number}/{legend.labels.index(level.label)}"
                lines.append(Distribution(key, name, legend.style(number, level.label), found))
    return lines


def _missing(runs: Sequence[Run]) -> Html:
    without = [run.name for run in runs if any(level.rows is None for level in run.report.levels)]
    return joined([element("p", f"{name} {NO_ROWS}", class_="missing") for name in without])


def _switches(legend: Legend) -> Html:
    """A box for each level, and for each run of several."""
    boxes = []
    if len(legend.labels) > 1:
        for place, label in enumerate(legend.labels):
            style = legend.style(0, label)
            boxes.append(
                _switch(f"level{place}", label, key_mark(Style(style.color, 0, style.shape)), on=legend.shown(label))
            )
    if len(legend.runs) > 1:
        for number, run in enumerate(legend.runs):
            style = legend.run_style(number) if len(legend.labels) == 1 else Style(-1, number, 0)
            mark = key_mark(style) if len(legend.labels) == 1 else _dash_mark(number)
            boxes.append(_switch(f"run{number}", run.name, mark, on=True))
    return element("div", *boxes, class_="switches", role="group", aria_label="Shown series")


def _dash_mark(number: int) -> Html:
    line = element("g", element("polyline", points="1,7 27,7"), class_=f"line neutral d{number % 6}")
    return element("svg", line, viewBox="0 0 28 14", class_="key", aria_hidden="true")


def _switch(name: str, text: str, mark: Html, *, on: bool) -> Html:
    return element("label", element("input", type="checkbox", data_shows=name, checked=on), mark, element("span", text))


def _figure(title: str, *charts: Html, name: str = "") -> Html:
    return element(
        "figure", element("h3", title), *charts, element("figcaption", " ", class_="readout"), data_metric=name or None
    )


def tradeoffs(runs: Sequence[Run]) -> Html:
    """Only with two levels or two runs: a single mark says nothing."""
    if sum(len(run.report.levels) for run in runs) < 2:
        return Html("")
    legend = Legend(runs)
    figures = [
        _figure(quantity.title, *charts)
        for quantity in _metrics(runs).times
        if (charts := [chart for percent in TRADEOFF_PERCENTS if (chart := _tradeoff(runs, legend, quantity, percent))])
    ]
    picks = [
        element(
            "label", element("input", type="radio", name="percent", value=percent, checked=percent == "p95"), percent
        )
        for percent in TRADEOFF_PERCENTS
    ]
    keys = [
        element("span", key_mark(legend.run_style(number)), run.name, class_="entry")
        for number, run in enumerate(runs)
        if len(runs) > 1
    ]
    head = element(
        "div", element("div", *picks, class_="picks", role="group", aria_label="Percentile"), *keys, class_="switches"
    )
    note = "One mark per level, from the lightest load to the heaviest. Right and low is better."
    return (
        joined([head, element("div", *figures, class_="charts"), element("p", note, class_="quiet")])
        if figures
        else Html("")
    )


def _tradeoff(runs: Sequence[Run], legend: Legend, quantity: Quantity, percent: str) -> Html | None:
    paths, metrics, unit = [], _metrics(runs), ""
    for number, run in enumerate(runs):
        points = []
        for level in run.report.levels:
            spread = quantity.of(level)
            if spread is None:
                continue
            x, y, unit = metrics.speed(level), getattr(spread, percent), metrics.speed_unit(level)
            name = run.name if len(runs) > 1 else ""
            details = point_details(name, level.label, f"{rate_text(x)} {unit}", f"{quantity.name} {percent}", y)
            points.append(Point(_short(level.label), x, y, details))
        if points:
            paths.append(Path(number, run.name, legend.run_style(number), points))
    return tradeoff_chart(quantity.title, percent, paths, unit=unit, hidden=percent != "p95") if paths else None


def _short(label: str) -> str:
    """`concurrency 16` -> `16`, `rate 2/s` -> `2/s`: the last word."""
    return label.rsplit(" ", 1)[-1]


def timelines(runs: Sequence[Run]) -> Html:
    choices = [
        (f"{number}/{place}", f"{run.name}: {level.label}" if len(runs) > 1 else level.label, len(level.rows))
        for number, run in enumerate(runs)
        for place, level in enumerate(run.report.levels)
        if level.rows
    ]
    if not choices:
        return joined([_missing(runs)])
    options = [element("option", name, value=key, selected=key == choices[-1][0]) for key, name, _ in choices]
    thinned = any(count > MAX_LANES for _, _, count in choices)
    rule = f" {THINNED}" if thinned else ""
    is_chat = runs[0].report.request_kind == "chat"
    speed = "Output tokens per second" if is_chat else f"{_metrics(runs).throughput.name}, as answers ended"
    users = "Requests that wait for their first token, and those that get tokens, over time"
    gaps = "Gaps between tokens over time, by size"
    return joined([
        element("noscript", element("p", "These figures need the page's script, which is switched off.", class_="missing")),
        element("div", element("label", "Level ", element("select", *options, id="level")), class_="switches"),
        _panel(speed, "tokens", f"{speed} over time"),
        _panel("Requests under way", "users", users if is_chat else "Requests under way over time"),
        _panel("Gaps between tokens, stronger where there are more", "heat", gaps) if is_chat else None,
        _panel("Requests", "lanes", "Requests as bars over time. Arrow keys choose a request.", focus=True),
        element("p", "", id="request", class_="details", role="status", aria_live="polite"),
        element("div", id="keys", class_="keys"),
        element("p", f"Move over a bar, tap it, or use the arrow keys for its numbers.{rule}", class_="quiet"),
    ])  # fmt: skip


def _panel(title: str, name: str, description: str, *, focus: bool = False) -> Html:
    canvas = element("canvas", id=name, role="img", aria_label=description, tabindex="0" if focus else None)
    return element("div", element("h3", title), element("output", "", id=f"{name}-at"), canvas, class_="panel")


def chart_data(runs: Sequence[Run]) -> dict[str, Any]:
    """What the script needs: percentiles of each line, and the timelines."""
    legend = Legend(runs)
    return {
        "percents": PERCENTS,
        "lines": {
            quantity.field.removesuffix("_ms"): [
                [line.key, line.name, line.quantiles] for line in _distribution_lines(runs, legend, quantity)
            ]
            for quantity in _metrics(runs).times
        },
        "timelines": {
            f"{number}/{place}": found
            for number, run in enumerate(runs)
            for place, level in enumerate(run.report.levels)
            if (found := timeline(level, run.report.metrics.throughput)) is not None
        },
        "kind": runs[0].report.request_kind,
        "lanes": count_text(MAX_LANES),
    }
