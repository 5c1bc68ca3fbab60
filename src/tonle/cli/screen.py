"""What people see: two consoles, numbers written for reading, errors as one red line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tonle.errors import TonleError

if TYPE_CHECKING:
    from rich.console import Console

# Everything a terminal would obey rather than show: a model's words must not move the cursor or retitle the window.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def stdout() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def show_error(error: TonleError) -> None:
    from rich.text import Text

    stderr().print(Text(f"Error: {error.message}", style="red"))


def harmless(text: str) -> str:
    """`text` without control characters, except tab and newline."""
    return _CONTROL.sub("", text)


def size(num_bytes: int) -> str:
    """As disks count: 98.4 MB, 3.1 GB."""
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit in ("B", "kB") else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """42 ms, 1.3 s."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
