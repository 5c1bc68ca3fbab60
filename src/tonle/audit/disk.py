"""`Disk`: every touch of the file system the writer makes, in one place, so that a test can break it at the border.

Does: write whole files under their final name or not at all, append, flush, lock. Does not: know what it writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

TEMP_PREFIX = ".tmp-"  # a file that begins so is no record: its writer was interrupted
LOCK_NAME = ".lock"


# A FIFO with a file's name must not block, and a link must not lead elsewhere: both are an `OSError`.
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


class Disk:
    """Plain calls of the operating system; each raises `OSError`."""

    # Paths are text where a record's time counts: pathlib costs more than the calls of the system.

    def write_file(self, folder: str, name: str, content: bytes, *, durable: bool = False) -> None:
        """No reader ever sees half of it: written under a temporary name, then renamed."""
        temp = f"{folder}/{TEMP_PREFIX}{name}"
        try:
            self.write_new(temp, content, durable=durable)
            os.rename(temp, f"{folder}/{name}")  # noqa: PTH104
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temp)  # noqa: PTH108
            raise

    def write_new(self, path: str, content: bytes, *, durable: bool) -> None:
        fd = os.open(path, _WRITE | os.O_TRUNC, 0o640)
        try:
            _write_all(fd, content)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    def overwrite(self, path: Path, content: bytes, *, durable: bool = False) -> None:
        """Replace a small file's content in place by one of the same length.

        One write inside one page: a killed process leaves the old or the new content. A rename would be as safe and costs
        a flush on common file systems, every time.
        """
        fd = os.open(path, _WRITE, 0o640)
        try:
            if os.pwrite(fd, content, 0) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    def append(self, path: Path, content: bytes, *, durable: bool = False) -> None:
        """All of it or nothing: what a full disk cut short is taken back."""
        fd = os.open(path, _WRITE | os.O_APPEND, 0o640)
        try:
            size = os.fstat(fd).st_size
            try:
                _write_all(fd, content)
                if durable:
                    os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Make new names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_all(self, path: Path) -> None:
        """Flush the file system that holds `path`: one call for any number of files."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _syncfs is None:
                os.sync()
            elif _syncfs(fd) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(path))
        finally:
            os.close(fd)

    def free_bytes(self, path: Path) -> int:
        state = os.statvfs(path)
        return state.f_bavail * state.f_frsize


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. For those who write; readers share it for a while (`regular_file.py`)."""
    fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def _find_syncfs() -> ctypes._NamedFuncPointer | None:  # Linux has it, macOS does not
    try:
        return ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return None


_syncfs = _find_syncfs()
