"""`Axis`: where a value stands in a chart, and which round numbers are written beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOG_FROM = 15.0  # largest by smallest value; above it a linear axis would squeeze most of them together


@dataclass(frozen=True, slots=True)
class Axis:
    low: float
    high: float
    start: float  # in units of the picture
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)


def axis_of(values: Sequence[float], start: float, end: float, *, may_be_log: bool = True) -> Axis:
    """That holds all values: from 0 if linear, logarithmic if they are far apart."""
    there = [value for value in values if math.isfinite(value)]
    high = max(there, default=1.0) or 1.0
    positive = [value for value in there if value > 0]
    low = min(positive, default=high / 2)
    if may_be_log and high / low > LOG_FROM:
        return Axis(max(low * 0.9, high / 1e6), high * 1.1, start, end, log=True)
    return Axis(0.0, high * 1.06, start, end)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    count = int((high + step * 1e-6) / step)
    return [round(number * step, 12) for number in range(math.ceil(low / step - 1e-6), count + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 of each power of ten, or the powers alone if that were too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [float(f"{factor}e{power}") for power in powers for factor in factors]
        found = [value for value in found if low <= value <= high]
        if len(found) <= 6:
            break
    return found


def tick_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
