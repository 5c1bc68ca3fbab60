"""Small plots of characters: a histogram in one line, and throughput against latency as marks on a grid.

Does: text, in block characters or in ASCII. Does not: print or color.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console

from tonle.bench.numbers import ms_text, rate_text

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " .:-=+*#@"
LOG_FROM = 15.0  # largest by smallest value, from where on steps grow with the values


def can_show_blocks(console: Console) -> bool:
    """Whether block characters come out right: not on a terminal, or in a file, of another encoding."""
    return "utf" in console.encoding.lower() and not console.legacy_windows


def sparkline(heights: Sequence[float], *, blocks: bool = True) -> str:
    """One character per number, as high as it is; what is above 0 is never left blank."""
    marks = BLOCKS if blocks else ASCII_BLOCKS
    top = max(heights, default=0.0)
    if top <= 0:
        return " " * len(heights)
    return "".join(marks[0] if height <= 0 else marks[max(1, round(height / top * 8))] for height in heights)


def histogram(values: Sequence[float], width: int, *, blocks: bool = True) -> tuple[str, float, float, bool]:
    """A line of `width` characters, the values at its ends, and whether its steps grow with the values."""
    low, high = min(values), max(values)
    log = low > 0 and high / low > LOG_FROM
    counts = [0] * width
    for value in values:
        if high == low:
            place = 0.0
        elif log:
            place = math.log(value / low) / math.log(high / low)
        else:
            place = (value - low) / (high - low)
        counts[min(width - 1, int(place * width))] += 1
    return sparkline(counts, blocks=blocks), low, high, log


def histogram_line(name: str, values: Sequence[float], width: int, *, blocks: bool = True) -> str:
    """`TTFT  21.0 ▁▃█▆▂▁  ▁ 210 ms`."""
    line, low, high, log = histogram(values, width, blocks=blocks)
    edges = "▏", "▕"
    left, right = edges if blocks else ("|", "|")
    return f"{name:<5}{ms_text(low):>7} {left}{line}{right} {ms_text(high)} ms{' (log)' if log else ''}"


def scatter(
    points: Sequence[tuple[float, float, str]],
    *,
    width: int = 56,
    height: int = 9,
    x_name: str,
    y_name: str,
    blocks: bool = True,
) -> list[str]:
    """Lines of a plot with a mark and a label for each point (x, y, label); y is logarithmic if its values are far apart."""
    mark, corner, side, floor = ("●", "└", "│", "─") if blocks else ("*", "+", "|", "-")
    x_high = max(x for x, _, _ in points) or 1.0
    y_low, y_high = min(y for _, y, _ in points), max(y for _, y, _ in points)
    log = y_low > 0 and y_high / y_low > LOG_FROM
    low = math.log(y_low) if log else 0.0
    span = (math.log(y_high) if log else y_high) - low or 1.0
    room = max(len(label) for _, _, label in points) + 2
    grid = [[" "] * (width + room) for _ in range(height)]
    for x, y, label in points:
        column = round(x / x_high * (width - 1))
        line = height - 1 - round(((math.log(y) if log else y) - low) / span * (height - 1))
        grid[line][column] = mark
        _write_label(grid[line], column + 2, label)
    numbers = ms_text(y_high), ms_text(y_low if log else 0.0)
    left = max(map(len, numbers))
    lines = [f"{y_name}{' (log)' if log else ''}"]
    for place, row in enumerate(grid):
        number = numbers[0] if place == 0 else numbers[1] if place == height - 1 else ""
        lines.append(f"{number:>{left}} {side}{''.join(row)}".rstrip())
    lines.append(f"{'':>{left}} {corner}{floor * width}")
    end = rate_text(x_high)
    lines.append(f"{'':>{left}}  0{x_name:^{width - 1 - len(end)}}{end}")
    return lines


def _write_label(row: list[str], begin: int, label: str) -> None:
    """Where it covers no other mark or label; otherwise it is left out."""
    if all(cell == " " for cell in row[begin - 1 : begin + len(label) + 1]) and begin + len(label) <= len(row):
        row[begin : begin + len(label)] = label
