"""Numbers as sentences need them: 412 ms, 1,180 ms, 12.4 s, a 6,100-token prompt, 3 steps.

Does: write. Does not: know what they are about.
"""

from __future__ import annotations


def ms(seconds: float) -> str:
    """0.4 ms, 412 ms, 1,180 ms, 12.4 s."""
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    value = seconds * 1000
    return f"{value:,.0f} ms" if value >= 9.95 or value == 0 else f"{value:.1f} ms"


def length(seconds: float) -> str:
    """Of sound: 412 ms, 3.1 s, 100.4 s."""
    return ms(seconds) if seconds < 1 else f"{seconds:,.1f} s"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def a_prompt(tokens: int) -> str:
    """a 6,100-token prompt, an 8-token prompt."""
    number = f"{tokens:,}"
    first = number.partition(",")[0]
    article = "an" if number.startswith("8") or first in ("11", "18") else "a"
    return f"{article} {number}-token prompt"


def listed(words: list[str]) -> str:
    """x, y and z."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
