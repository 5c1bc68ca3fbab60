"""Numbers with units, as data sheets and people write them: 70B parameters, 141GB, 4.8TB/s, 990T operations per second.

Does: read them, with a clear refusal; write bytes, rates and counts for reports. Does not: know what they are of.
"""

from __future__ import annotations

import re

from tonle.errors import ConfigError

GB, GIB = 10**9, 1024**3
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMbBgGtTpP]?)")
_COUNT_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(i?)b?", re.IGNORECASE)
_BYTE_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_count(text: str, name: str) -> int:
    """Parameters and the like: `70B`, `1.5b`, `135M`, `128k`, `8192`. Raises `ConfigError`."""
    return round(_count(text, name, "a number such as 70B, 1.5B or 135M"))


def parse_bytes(text: str, name: str) -> int:
    """Memory: `141GB` (10⁹), `80GiB` or `80G` (2³⁰). Raises `ConfigError`."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{_flag(name)} takes a size such as 141GB or 80GiB, not {text!r}", param=name)
    binary = bool(match[3]) or not text.strip().lower().endswith("b")
    factor: int = (1024 if binary else 1000) ** _BYTE_POWERS[match[2].lower()]
    return round(float(match[1]) * factor)


def parse_bandwidth(text: str, name: str) -> float:
    """Bytes per second: `4.8TB/s`, `864 GB/s`; the `/s` may be left out. Raises `ConfigError`."""
    bare = re.sub(r"(?i)(/s|ps)$", "", text.strip())
    try:
        return float(parse_bytes(bare, name))
    except ConfigError:
        raise ConfigError(
            f"{_flag(name)} takes bytes per second such as 4.8TB/s or 864GB/s, not {text!r}", param=name
        ) from None


def parse_flops(text: str, name: str) -> float:
    """Operations per second: `990T`, `990 TFLOPS`, `2P`. Raises `ConfigError`."""
    bare = re.sub(r"(?i)\s*(flops|flop/s|ops|op/s)$", "", text.strip())
    return _count(bare, name, "operations per second such as 990T or 1.98P")


def _count(text: str, name: str, wanted: str) -> float:
    match = _COUNT.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{_flag(name)} takes {wanted}, not {text!r}", param=name)
    return float(match[1]) * _COUNT_POWERS[match[2].lower()]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def bytes_text(num_bytes: float) -> str:
    """In powers of 1000, with three digits: 141 GB, 39.8 GB, 328 kB."""
    return _scaled(num_bytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def count_text(number: float) -> str:
    """70.6B, 1.54B, 135M."""
    return _scaled(number, ("", "k", "M", "B", "T"), space="")


def flops_text(number: float) -> str:
    """Operations or operations per second: 989T, 1.98P."""
    return _scaled(number, ("", "k", "M", "G", "T", "P", "E"), space=" ")


def _scaled(value: float, units: tuple[str, ...], space: str = " ") -> str:
    power = 0
    while power < len(units) - 1 and float(f"{value:.3g}") >= 1000:
        value, power = value / 1000, power + 1
    shown = f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
    return f"{shown}{space if units[power] else ''}{units[power]}"
