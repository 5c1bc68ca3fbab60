"""Output for people: two consoles, errors as one red line, and numbers in words."""

from __future__ import annotations

import contextlib
import re
import sys
import termios
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tonle.errors import TonleError

if TYPE_CHECKING:
    from rich.console import Console

# Control characters: a model's output must not move the cursor or retitle the window.
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


def one_line(text: str) -> str:
    """`text` without control characters: what was written by others cannot look like a line of ours."""
    return harmless(text.replace("\n", " ").replace("\t", " "))


def count(number: int, noun: str) -> str:
    """1 record, 2 records, 1,024 records."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(num_bytes: int) -> str:
    """In powers of 1000: 98.4 MB, 3.1 GB."""
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit in ("B", "kB") else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """42 ms, 1.3 s."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


@contextlib.contextmanager
def streaming(console: Console) -> Iterator[Callable[[str], None]]:
    """Write an answer with what this gives, piece by piece. It ends with a newline.

    On a terminal, lines break at words and control characters are removed; a file gets the text as it is.
    """
    last = "\n"

    def write(text: str) -> None:
        nonlocal last
        console.file.write(text)
        console.file.flush()
        last = text[-1:] or last

    if not console.is_terminal or console.is_dumb_terminal:
        try:
            yield (lambda text: write(harmless(text))) if console.is_terminal else write
        finally:
            _end_line(write, last)
        return
    from tonle.cli.wrap import WordWrapper

    wrapper = WordWrapper(write, lambda: console.size.width)
    try:
        yield lambda text: wrapper.feed(harmless(text))
    finally:
        wrapper.finish()
        _end_line(write, last)


def _end_line(write: Callable[[str], None], last: str) -> None:
    if last != "\n":
        write("\n")


@contextlib.contextmanager
def keys_not_echoed() -> Iterator[bool]:
    """Each key can be read as it is pressed, and is not shown. False: standard input is no terminal, and nothing was changed."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (OSError, ValueError, termios.error):
        yield False
        return
    quiet = [*before]
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
    try:
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextlib.contextmanager
def typing_ahead() -> Iterator[None]:
    """Keys pressed while no prompt is shown are not echoed but kept for the next prompt. Ctrl-C works as ever.

    Around all of a chat, and not around each answer: in between, the terminal would swallow a Ctrl-D.
    """
    with keys_not_echoed() as is_terminal:
        if not is_terminal:
            yield
            return
        mark_pasted_text(on=True)
        try:
            yield
        finally:
            mark_pasted_text(on=False)


def mark_pasted_text(*, on: bool) -> None:
    """Have the terminal mark where pasted text begins and ends, so that a newline in it is not an Enter key."""
    console = stdout() if sys.stdout.isatty() else stderr()
    if console.is_terminal and not console.is_dumb_terminal:
        console.file.write("\x1b[?2004h" if on else "\x1b[?2004l")
        console.file.flush()
