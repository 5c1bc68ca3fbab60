"""Charts as inline SVG: distributions of latencies, and throughput against latency. They need no script to be seen.

Does: draw. Does not: choose what is drawn (`figures.py`). Series differ by color, by dashes (runs) and by the shape of their
marks (levels), so that they can be told apart without color. Sizes are units of the picture, which scales with the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tonle.bench.html.axes import Axis, axis_of, tick_text
from tonle.bench.html.elements import Html, element
from tonle.bench.html.series import PERCENTS
from tonle.bench.numbers import ms_text

WIDTH, HEIGHT = 520, 290
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 26, 40
NUM_COLORS = 8
NUM_SHAPES = 6
MARK_SIZE = 4.5
MARKED_PERCENTS = (50, 95)
SECONDS_FROM_MS = 10_000


@dataclass(frozen=True, slots=True)
class Style:
    """How a series looks."""

    color: int  # 0 to 7, cold to warm
    dash: int = 0
    shape: int = 0

    @property
    def classes(self) -> str:
        return f"c{self.color % NUM_COLORS} d{self.dash % NUM_SHAPES}"


@dataclass(frozen=True, slots=True)
class Distribution:
    """One line of a distribution chart. `key` names it to the script: `run/level`."""

    key: str
    name: str
    style: Style
    quantiles: Sequence[float]  # at `PERCENTS`


@dataclass(frozen=True, slots=True)
class Point:
    """One level of a run in a chart of throughput against latency."""

    label: str  # short, beside the mark
    x: float
    y: float
    details: str


@dataclass(frozen=True, slots=True)
class Path:
    """One run in such a chart."""

    run: int
    name: str
    style: Style
    points: Sequence[Point]


def distribution_chart(title: str, lines: Sequence[Distribution]) -> Html:
    """Shares of requests (or gaps) up to a latency."""
    values = [line.quantiles[0] for line in lines] + [line.quantiles[-1] for line in lines]
    x = axis_of(values, LEFT, WIDTH - RIGHT)
    y = Axis(0, 100, HEIGHT - BOTTOM, TOP)
    drawn = [_distribution(line, x, y) for line in lines]
    parts = [_grid(x, y, "time", "%"), *drawn, element("g", class_="guide")]
    return _picture(f"{title}: shares of values up to a latency", parts, kind="cdf")


def _distribution(line: Distribution, x: Axis, y: Axis) -> Html:
    places = [(x.place(value), y.place(percent)) for value, percent in zip(line.quantiles, PERCENTS, strict=True)]
    marks = [_mark(*places[percent], line.style.shape) for percent in MARKED_PERCENTS]
    return element(
        "g",
        element("title", line.name),
        element("polyline", points=_points(places)),
        *marks,
        class_=f"line {line.style.classes}",
        data_key=line.key,
    )


def tradeoff_chart(title: str, percent: str, paths: Sequence[Path], *, unit: str, hidden: bool) -> Html:
    """Throughput, in `unit`, against a percentile of a latency, one mark per level."""
    points = [point for path in paths for point in path.points]
    x = axis_of([point.x for point in points], LEFT, WIDTH - RIGHT, may_be_log=False)
    y = axis_of([point.y for point in points], HEIGHT - BOTTOM, TOP)
    parts = [_grid(x, y, unit, "time"), *(_path(path, x, y) for path in paths)]
    against = "output tokens per second" if unit == "output tok/s" else unit
    return _picture(f"{title} {percent} against {against}", parts, kind=f"tradeoff {percent}", hidden=hidden)


def _path(path: Path, x: Axis, y: Axis) -> Html:
    places = [(x.place(point.x), y.place(point.y)) for point in path.points]
    marks = []
    for (left, top), point in zip(places, path.points, strict=True):
        # Labels stand left of marks near the right edge, so that they stay inside.
        aside = left > WIDTH - RIGHT - 40
        text = element(
            "text", point.label, x=left + (-8 if aside else 8), y=top - 7, text_anchor="end" if aside else "start",
            class_="label",
        )  # fmt: skip
        marks.append(
            element(
                "g", element("title", point.details), _mark(left, top, path.style.shape, size=5.5), text,
                class_="point", tabindex="0", role="img", aria_label=point.details,
            )
        )  # fmt: skip
    line = element("polyline", points=_points(places)) if len(places) > 1 else None
    return element("g", line, *marks, class_=f"line {path.style.classes}", data_run=str(path.run))


def point_details(name: str, label: str, speed: str, what: str, y: float) -> str:
    return f"{name}{', ' if name else ''}{label}: {speed}, {what} {ms_text(y)} ms"


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{left:g},{top:g}" for left, top in places)


def _mark(left: float, top: float, shape: int, *, size: float = MARK_SIZE) -> Html:
    """A circle, square, triangle, diamond, triangle on its head or cross."""
    shape %= NUM_SHAPES
    if shape == 0:
        return element("circle", cx=left, cy=top, r=size * 0.9, class_="mark")
    if shape == 1:
        return element(
            "rect", x=left - size * 0.8, y=top - size * 0.8, width=size * 1.6, height=size * 1.6, class_="mark"
        )
    corners: dict[int, list[tuple[float, float]]] = {
        2: [(0, -1.1), (1, 0.8), (-1, 0.8)],
        3: [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
        4: [(0, 1.1), (1, -0.8), (-1, -0.8)],
        5: [(-1, -1), (-0.35, -1), (0, -0.45), (0.35, -1), (1, -1), (0.45, 0), (1, 1), (0.35, 1), (0, 0.45), (-0.35, 1),
            (-1, 1), (-0.45, 0)],
    }  # fmt: skip
    return element(
        "polygon",
        points=_points([(round(left + dx * size, 1), round(top + dy * size, 1)) for dx, dy in corners[shape]]),
        class_="mark",
    )


def _grid(x: Axis, y: Axis, x_name: str, y_name: str) -> Html:
    """Lines and numbers of both axes; the units stand at their ends. `time` is in milliseconds, or seconds if it is long."""
    lines, texts = [], []
    (x_unit, x_scale), (y_unit, y_scale) = _unit(x, x_name), _unit(y, y_name)
    for tick in y.ticks():
        top = y.place(tick)
        lines.append(element("line", x1=x.start, x2=x.end, y1=top, y2=top))
        texts.append(element("text", tick_text(tick / y_scale), x=x.start - 7, y=top + 4, text_anchor="end"))
    for tick in x.ticks():
        left = x.place(tick)
        lines.append(element("line", x1=left, x2=left, y1=y.start, y2=y.end))
        anchor = "end" if left > x.end - 12 else "middle"
        texts.append(element("text", tick_text(tick / x_scale), x=left, y=y.start + 16, text_anchor=anchor))
    texts.append(element("text", x_unit, x=x.end, y=HEIGHT - 6, text_anchor="end", class_="unit"))
    texts.append(element("text", y_unit, x=4, y=13, class_="unit"))
    return element("g", element("g", *lines, class_="lines"), element("g", *texts, class_="numbers"), class_="grid")


def _unit(axis: Axis, name: str) -> tuple[str, float]:
    """What is written at the end of an axis, and what its values are divided by."""
    unit, scale = (name, 1.0) if name != "time" else ("s", 1e3) if axis.high >= SECONDS_FROM_MS else ("ms", 1.0)
    return f"{unit} (log)" if axis.log else unit, scale


def _picture(description: str, parts: Sequence[Html], *, kind: str, hidden: bool = False) -> Html:
    box = f"{LEFT} {TOP} {WIDTH - LEFT - RIGHT} {HEIGHT - TOP - BOTTOM}"
    return element(
        "svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_=f"chart {kind}", role="img", aria_label=description,
        data_box=box, tabindex="0" if kind == "cdf" else None, hidden=hidden or None,
    )  # fmt: skip


def key_mark(style: Style) -> Html:
    """A piece of a line with its mark, for the legend."""
    return element(
        "svg",
        element("g", element("polyline", points="1,7 27,7"), _mark(14, 7, style.shape), class_=f"line {style.classes}"),
        viewBox="0 0 28 14", class_="key", aria_hidden="true",
    )  # fmt: skip
