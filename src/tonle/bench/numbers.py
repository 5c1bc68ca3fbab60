"""How numbers of a report are written: about three digits, never more than a reader can use.

Does: text from numbers, for terminals, HTML and Markdown alike. Does not: round what is saved or exported as CSV.
"""

from __future__ import annotations

import math

from tonle.errors import ConfigError

NOTHING = "–"


def ms_text(value: float | None) -> str:
    """Milliseconds: `0.82`, `21.4`, `1,204`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rate_text(value: float | None) -> str:
    """Something per second: `0.84`, `21.4`, `1,204`."""
    return ms_text(value)


def share_text(value: float | None) -> str:
    """A share of 1 in percent: `97.5 %`."""
    return NOTHING if value is None else f"{100 * value:.1f} %"


def change_text(value: float | None, *, points: bool = False) -> str:
    """A relative change, or one of a share in percentage points, with its sign: `+3.1 %`, `−0.5 pp`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    size = abs(100 * value)
    digits = f"{size:,.0f}" if size >= 100 else f"{size:.1f}"
    sign = "±" if digits == "0.0" else "−" if value < 0 else "+"
    return f"{sign}{digits} {'pp' if points else '%'}"


def bytes_text(value: int | None) -> str:
    """Of memory: `79.6 GiB`."""
    if value is None:
        return NOTHING
    size, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


def count_text(value: float) -> str:
    """A whole number with its thousands apart: `12,400`."""
    return f"{value:,.0f}"


def clock_text(seconds: float) -> str:
    """`0:07`, `12:30`, `1:02:03`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def parse_share(text: str, name: str) -> float:
    """Read `5%`, `5 %` or `0.05` as 0.05. Raises `ConfigError`."""
    number, percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise ConfigError(f"{name} is a share such as 5% or 0.05, not {text!r}", param=name)
    return value
