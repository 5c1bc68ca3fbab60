"""The picture of throughput against latency: simulated settings as dots, their front as a line, what was measured on top. SVG.

Does: draw. Does not: choose what is best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tonle.bench.html.axes import Axis, axis_of, tick_text
from tonle.bench.html.elements import Html, element
from tonle.bench.slo import duration_text
from tonle.tune.objective import Goal, Outcome
from tonle.tune.results import TuneResult
from tonle.tune.space import describe, key_of
from tonle.tune.stage_simulated import pareto_front

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 18, 28, 46


def front_picture(result: TuneResult) -> Html:
    """Nothing, if nothing was simulated or measured."""
    goal = result.goal
    points = [trial.outcome for trial in result.trials] + [each.measured for each in result.candidates]
    known = [(goal.latency_ms(point), point.output_tokens_per_s) for point in points]
    latencies = [ms for ms, _ in known if ms is not None]
    if not latencies:
        return Html("")
    limit = goal.latency.limit_ms
    shown = [*latencies, limit] if math.isfinite(limit) else latencies
    x = axis_of(shown, LEFT, WIDTH - RIGHT)
    y = axis_of([value for _, value in known], HEIGHT - BOTTOM, TOP, may_be_log=False)
    parts = [
        _grid(x, y, f"{goal.latency.metric.upper()} p{goal.latency.percent:g}, ms"),
        _limit(x, limit),
        _front(result, x, y),
        *(_dot(goal, trial.outcome, describe(trial.settings), "simulated", x, y) for trial in result.trials),
        *(_measured(result, each.settings, each.measured, x, y) for each in result.candidates),
    ]
    title = "Output tokens per second against latency: simulated and measured settings"
    return element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title, class_="front")


def _grid(x: Axis, y: Axis, x_name: str) -> Html:
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
    texts.append(element("text", "output tok/s", x=6, y=16))
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


def _front(result: TuneResult, x: Axis, y: Axis) -> Html:
    goal = result.goal
    places = []
    for trial in pareto_front(result.trials, goal):
        ms = goal.latency_ms(trial.outcome)
        places.append(f"{x.place(ms or 0.0):g},{y.place(trial.outcome.output_tokens_per_s):g}")
    return element("polyline", points=" ".join(places), class_="best") if len(places) > 1 else Html("")


def _dot(goal: Goal, outcome: Outcome, name: str, how: str, x: Axis, y: Axis, *, class_: str = "") -> Html:
    ms = goal.latency_ms(outcome)
    if ms is None:
        return Html("")
    held = "" if not goal.slo else " holds" if outcome.holds else " misses"
    details = f"{name} ({how}): {outcome.output_tokens_per_s:.4g} output tok/s, {duration_text(ms)}"
    if goal.slo:
        details += f", {outcome.goodput_per_s or 0:.3g} good requests/s, SLO {'held' if outcome.holds else 'missed'}"
    size = 2.6 if how == "simulated" else 6.0
    return element(
        "circle", cx=x.place(ms), cy=y.place(outcome.output_tokens_per_s), r=size, class_=f"{class_ or how}{held}",
        aria_label=details,
    ) if how == "simulated" else element(
        "g", element("title", details),
        element("circle", cx=x.place(ms), cy=y.place(outcome.output_tokens_per_s), r=size, class_=f"{class_ or how}{held}"),
    )  # fmt: skip


def _measured(result: TuneResult, settings: dict[str, object], outcome: Outcome, x: Axis, y: Axis) -> Html:
    ms = result.goal.latency_ms(outcome)
    if ms is None:
        return Html("")
    is_best = bool(settings) and key_of(settings) == key_of(result.settings)
    dot = _dot(result.goal, outcome, describe(settings), "measured", x, y)
    name = "default" if not settings else "best" if is_best else ""
    if not name:
        return dot
    left, top = x.place(ms), y.place(outcome.output_tokens_per_s)
    near_end = left > WIDTH - 80
    text = element(
        "text", name, x=left + (-10 if near_end else 10), y=top - 8, text_anchor="end" if near_end else "start"
    )
    return element("g", dot, text, class_="named")


def legend(result: TuneResult) -> Sequence[str]:
    """What the marks mean."""
    parts = ["small dots: simulated", "large dots: measured in the search", "line: the front of what was simulated"]
    if result.goal.slo:
        parts.append("green: the SLO holds, red: it is missed")
    return parts
