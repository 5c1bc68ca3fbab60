"""Reading files that may have been put there by an attacker: regular files of bounded size, and nothing else.

A FIFO would block the reader for ever, a device has no end, a symbolic link leads elsewhere, and a sparse file of a terabyte
fills the memory. Opened this way, each of them is an `OddFileError` at once.

Does: open, read and hash with bounds; share the directory's lock for a bounded time. Does not: know what is in a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from tonle.audit.disk import LOCK_NAME

PIECE_BYTES = 1 << 20
LOCK_WAIT_S = 10.0  # a process that holds the lock for longer is not writing a batch
_LOCK_RETRY_S = 0.01
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = (
    (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip


class OddFileError(ValueError):
    """The name is taken, but not by a regular file of a reasonable size that can be read. The text says by what."""


def open_regular(path: str | Path, max_bytes: int, *, follow_links: bool = False) -> tuple[int, int]:
    """A file descriptor and the size at this moment. Raises `FileNotFoundError` or `OddFileError`."""
    try:
        fd = os.open(path, _FLAGS | (0 if follow_links else os.O_NOFOLLOW))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL or half a surrogate pair in the name
        raise OddFileError(_why_not_opened(path, error)) from error
    state = os.fstat(fd)
    if stat.S_ISREG(state.st_mode) and state.st_size <= max_bytes:
        return fd, state.st_size
    os.close(fd)
    if stat.S_ISREG(state.st_mode):
        raise OddFileError(f"it has {state.st_size:,} bytes; at most {max_bytes:,} are read")
    raise OddFileError(f"it is {kind_of(state.st_mode)}, not a regular file")


def read_regular(path: str | Path, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """What the file held when it was opened. Raises `FileNotFoundError` or `OddFileError`."""
    fd, size = open_regular(path, max_bytes, follow_links=follow_links)
    try:
        return b"".join(pieces(fd, size))
    finally:
        os.close(fd)


def hash_regular(path: str | Path, max_bytes: int) -> str:
    """SHA-256 of the content, in hex. Raises `FileNotFoundError` or `OddFileError`."""
    fd, size = open_regular(path, max_bytes)
    try:
        digest = hashlib.sha256()
        for piece in pieces(fd, size):
            digest.update(piece)
        return digest.hexdigest()
    finally:
        os.close(fd)


def pieces(fd: int, size: int) -> Iterator[bytes]:
    """At most `size` bytes: a file that grows while it is read has an end all the same. Raises `OddFileError`."""
    while size > 0:
        try:
            piece = os.read(fd, min(size, PIECE_BYTES))
        except OSError as error:
            raise OddFileError(error.strerror or str(error)) from error
        if not piece:
            return
        size -= len(piece)
        yield piece


def regular_files(folder: Path, max_bytes: int) -> Iterator[Path]:
    """Those of a folder that `read_regular` would read. Raises `OSError`."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            state = path.lstat()
            if stat.S_ISREG(state.st_mode) and state.st_size <= max_bytes:
                yield path


def kind_of(mode: int) -> str:
    return next((words for is_kind, words in _KINDS if is_kind(mode)), "something unknown")


def printable(name: str) -> str:
    """A file name of any bytes as text that can be printed and encoded."""
    return name.encode(errors="surrogatepass").decode(errors="backslashreplace")


def _why_not_opened(path: str | Path, error: OSError | ValueError) -> str:
    with contextlib.suppress(OSError, ValueError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            return f"it is {kind_of(mode)}, not a regular file"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "its name is not one that a file can have"


@contextlib.contextmanager
def shared_lock(directory: Path) -> Iterator[bool]:
    """Keep writers out while a trail is read, for consistency. Whether that worked: a lock that is held for ever, or is no
    lock file at all, must not keep anyone from verifying."""
    try:
        fd, _ = open_regular(directory / LOCK_NAME, PIECE_BYTES)
    except (FileNotFoundError, OddFileError):
        yield False
        return
    try:
        yield _lock_within(fd, LOCK_WAIT_S)
    finally:
        os.close(fd)


def _lock_within(fd: int, wait_s: float) -> bool:
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOCK_RETRY_S)
        else:
            return True
