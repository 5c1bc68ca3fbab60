"""Reading ledgers line by line, with bounds: memory for one line, whatever the file holds.

Does: read. Does not: check that lines follow each other (`verify_ledgers.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tonle.audit import day_ledger
from tonle.audit.day_ledger import LEDGER_NAME
from tonle.audit.regular_file import OddFileError, open_regular, pieces

ANY_SIZE = 1 << 62  # a ledger is read line by line: its size does not matter
MAX_LINE_BYTES = 16 << 20  # a repair may name thousands of files in one line


def texts_of(path: Path, size: int | None = None, *, start: int = 0, with_unfinished: bool = True) -> Iterator[bytes]:
    """Lines without their ends, from byte `start` up to `size`. Raises `FileNotFoundError` or `OddFileError`.

    `with_unfinished`: also a last line that has no end.
    """
    fd, whole = open_regular(path, ANY_SIZE)
    try:
        rest = b""
        os.lseek(fd, start, os.SEEK_SET)
        for piece in pieces(fd, (whole if size is None else min(size, whole)) - start):
            *texts, rest = (rest + piece).split(b"\n")
            yield from texts
            if len(rest) > MAX_LINE_BYTES:
                raise OddFileError(f"a line has more than {MAX_LINE_BYTES:,} bytes; nothing after it is read")
        if rest and with_unfinished:
            yield rest
    finally:
        os.close(fd)


def ends_with_link(path: Path, end: int, link: str) -> bool:
    """Whether the line that ends at byte `end` has this link."""
    mark = mark_of(link)
    try:
        fd, size = open_regular(path, ANY_SIZE)
    except (FileNotFoundError, OddFileError):
        return False
    try:
        return len(mark) <= end <= size and os.pread(fd, len(mark), end - len(mark)) == mark
    except OSError:
        return False
    finally:
        os.close(fd)


def end_of_link(path: Path, start: int, link: str) -> int | None:
    """Where the line with this link ends, if it is after byte `start`. Raises `FileNotFoundError` or `OddFileError`."""
    mark = mark_of(link)
    fd, size = open_regular(path, ANY_SIZE)
    try:
        start = start if start <= size else 0
        os.lseek(fd, start, os.SEEK_SET)
        rest = b""
        for piece in pieces(fd, size - start):
            window = rest + piece
            if (at := window.find(mark)) >= 0:
                return start + at + len(mark)
            rest = window[-len(mark) :]
            start += len(window) - len(rest)
        return None
    finally:
        os.close(fd)


def pruned_since(directory: Path, day: str) -> set[str]:
    """Days of which a ledger after `day` says that they were removed."""
    gone = set()
    for later in day_ledger.days_in(directory):
        if later < day:
            continue
        try:
            for text in texts_of(directory / later / LEDGER_NAME):
                if b'"kind":"pruned"' in text:
                    gone.add(str(day_ledger.decode_line(text).day))
        except (FileNotFoundError, ValueError):
            continue
    return gone


def mark_of(link: str) -> bytes:
    """How a line with this link ends."""
    return b',"link":"%b"}\n' % link.encode(errors="replace")
