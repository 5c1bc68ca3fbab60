"""The picture of what settings give against latency: simulated ones as dots, their front as a line, measured ones on top. SVG.

Does: draw goodput, or throughput without an SLO, against the latency that comes closest to its limit with the default settings.
Does not: choose what is best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tonle.bench.html.axes import Axis, axis_of, tick_text
from tonle.bench.html.elements import Html, element
from tonle.bench.slo import Bound, duration_text
from tonle.tune.objective import Outcome
from tonle.tune.results import TuneResult
from tonle.tune.space import describe, key_of

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 18, 28, 46


@dataclass(frozen=True, slots=True)
class _Point:
    x: float  # latency, ms
    y: float  # good requests, or output tokens, per second
    details: str
    held: str  # class of the mark


class _View:
    """What of an outcome is shown."""

    def __init__(self, result: TuneResult) -> None:
        self.goal = result.goal
        self.by_goodput = bool(self.goal.slo) and self.goal.maximize != "throughput"
        self._place = _tightest(result)
        self.bound = self.goal.slo.bounds[self._place] if self.goal.slo else Bound("e2el", 95, math.inf)

    @property
    def y_name(self) -> str:
        return "good requests/s" if self.by_goodput else "output tok/s"

    def point(self, outcome: Outcome, name: str) -> _Point | None:
        if self.goal.slo:
            ms = outcome.bounds[self._place].value_ms if outcome.bounds else None
        else:
            ms = None if outcome.e2el_ms is None else outcome.e2el_ms.p95
        if ms is None:
            return None
        details = f"{name}: {outcome.output_tokens_per_s:.4g} output tok/s, {duration_text(ms)}"
        held = ""
        if self.goal.slo:
            held = " holds" if outcome.holds else " misses"
            details += (
                f", {outcome.goodput_per_s or 0:.3g} good requests/s, SLO {'held' if outcome.holds else 'missed'}"
            )
        y = (outcome.goodput_per_s or 0.0) if self.by_goodput else outcome.output_tokens_per_s
        return _Point(ms, y, details, held)


def _tightest(result: TuneResult) -> int:
    """The place of the bound that the default comes closest to, or misses by most."""
    known = [each.measured for each in result.candidates if not each.settings]
    known += [trial.outcome for trial in result.trials if not trial.settings]
    if not known or not known[0].bounds:
        return 0
    used = [(each.value_ms or math.inf) / each.bound.limit_ms for each in known[0].bounds]
    return used.index(max(used))


def front_picture(result: TuneResult) -> Html:
    """Nothing, if nothing was simulated or measured."""
    view = _View(result)
    simulated = [view.point(each.outcome, f"{describe(each.settings)} (simulated)") for each in result.trials]
    dots = [point for point in simulated if point is not None]
    measured = [
        (point, each.settings)
        for each in result.candidates
        if (point := view.point(each.measured, f"{describe(each.settings)} (measured)")) is not None
    ]
    shown = [*dots, *(point for point, _ in measured)]
    if not shown:
        return Html("")
    limit = view.bound.limit_ms
    latencies = [point.x for point in shown]
    x = axis_of([*latencies, limit] if math.isfinite(limit) else latencies, LEFT, WIDTH - RIGHT)
    y = axis_of([point.y for point in shown], HEIGHT - BOTTOM, TOP, may_be_log=False)
    parts = [
        _grid(x, y, f"{view.bound.metric.upper()} p{view.bound.percent:g}, ms", view.y_name),
        _limit(x, limit),
        _front(dots, x, y),
        *(_dot(point, x, y) for point in dots),
        *(_measured(point, settings, result, x, y) for point, settings in measured),
    ]
    title = f"{view.y_name} against latency: simulated and measured settings"
    return element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title, class_="front")


def _grid(x: Axis, y: Axis, x_name: str, y_name: str) -> Html:
    lines, texts = [], []
    for tick in y.ticks():
        top = y.place(tick)
        lines.append(element("line", x1=x.start, x2=x.end, y1=top, y2=top))
        texts.append(element("text", tick_text(tick), x=x.start - 8, y=top + 4, text_anchor="end"))
    for tick in x.ticks():
        left = x.place(tick)
        lines.append(element("line", x1=left, x2=left, y1=y.start, y2=y.end))
        texts.append(element("text", tick_text(tick), x=left, y=y.start + 17, text_anchor="middle"))
    texts.append(element("text", x_name + (" (log)" if x.log else ""), x=x.end, y=HEIGHT - 8, text_anchor="end"))
    texts.append(element("text", y_name, x=6, y=16))
    return element("g", *lines, *texts, class_="grid")


def _limit(x: Axis, limit_ms: float) -> Html:
    if not math.isfinite(limit_ms):
        return Html("")
    left = x.place(limit_ms)
    near_end = left > WIDTH - 120
    return element(
        "g",
        element("line", x1=left, x2=left, y1=TOP, y2=HEIGHT - BOTTOM),
        element("text", f"limit {duration_text(limit_ms)}", x=left + (-6 if near_end else 6), y=TOP + 12,
                text_anchor="end" if near_end else "start"),
        class_="limit",
    )  # fmt: skip


def _front(dots: Sequence[_Point], x: Axis, y: Axis) -> Html:
    places = [f"{x.place(ms):g},{y.place(value):g}" for ms, value in pareto_front((dot.x, dot.y) for dot in dots)]
    return element("polyline", points=" ".join(places), class_="best") if len(places) > 1 else Html("")


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Pairs of latency and yield that no other pair beats in both, by latency."""
    front: list[tuple[float, float]] = []
    for ms, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or value > front[-1][1]:
            front.append((ms, value))
    return front


def _dot(point: _Point, x: Axis, y: Axis) -> Html:
    place = {"cx": x.place(point.x), "cy": y.place(point.y)}
    return element("circle", **place, r=2.6, class_=f"simulated{point.held}", aria_label=point.details)


def _measured(point: _Point, settings: dict[str, object], result: TuneResult, x: Axis, y: Axis) -> Html:
    left, top = x.place(point.x), y.place(point.y)
    circle = element("circle", cx=left, cy=top, r=6.0, class_=f"measured{point.held}")
    dot = element("g", element("title", point.details), circle)
    is_best = bool(settings) and key_of(settings) == key_of(result.settings)
    if settings and not is_best:
        return dot
    # The default's name below its mark, the best's above: they may be close.
    near_end = left > WIDTH - 80
    text = element(
        "text", "best" if is_best else "default", x=left + (-10 if near_end else 10), y=top + (-9 if is_best else 18),
        text_anchor="end" if near_end else "start",
    )  # fmt: skip
    return element("g", dot, text, class_="named")


def legend(result: TuneResult) -> Sequence[str]:
    """What the marks mean."""
    parts = ["small dots: simulated", "large dots: measured in the search", "line: the front of what was simulated"]
    if result.goal.slo:
        parts.append("green: the SLO holds, red: it is missed")
    return parts
