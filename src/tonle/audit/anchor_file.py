"""The file that `audit_anchor` names: ends of the chain, one signed head on each line, only ever appended to.

It may be on another volume or another machine's disk, and the operating system can be told to refuse anything but appending.

Does: append, read the last lines with bounds. Does not: decide what a line that is not in the chain means (`verify.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tonle.audit.day_ledger import Head
from tonle.audit.ledger_reader import ANY_SIZE
from tonle.audit.regular_file import open_regular, pieces

TAIL_BYTES = 16 << 20  # of the file that is read: about 35,000 heads

_decode = msgspec.json.Decoder(Head).decode


def append(path: Path, head: Head) -> None:
    """Raises `OSError`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK, 0o640)
    try:
        os.write(fd, msgspec.json.encode(head) + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)


def read_tail(path: Path) -> list[Head]:
    """The heads in the last part of the file; other lines are passed over. Raises `FileNotFoundError` or `OddFileError`."""
    fd, size = open_regular(path, ANY_SIZE, follow_links=True)
    try:
        start = max(0, size - TAIL_BYTES)
        os.lseek(fd, start, os.SEEK_SET)
        lines = b"".join(pieces(fd, size - start)).split(b"\n")
    finally:
        os.close(fd)
    heads = []
    for line in lines:
        try:
            heads.append(_decode(line))
        except (ValueError, RecursionError):  # the first may be cut; others were not written by us
            continue
    return heads
