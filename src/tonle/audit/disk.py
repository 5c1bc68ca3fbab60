"""`Disk`: every touch of the file system the writer makes, in one place, so that a test can break it at the border.

Does: write whole files under their final name or not at all, append, flush, lock. Does not: know what it writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

TEMP_PREFIX = ".tmp-"  # a file that begins so is no record: its writer was interrupted
LOCK_NAME = ".lock"


class Disk:
    """Plain calls of the operating system; each raises `OSError`."""

    def write_file(self, path: Path, content: bytes, *, durable: bool = False, private: bool = False) -> None:
        """Nobody ever sees half of it: written under a temporary name, then renamed."""
        temp = path.parent / f"{TEMP_PREFIX}{path.name}"
        try:
            self.write_new(temp, content, durable=durable, private=private)
            temp.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                temp.unlink()
            raise

    def write_new(self, path: Path, content: bytes, *, durable: bool, private: bool = False) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600 if private else 0o640)
        try:
            _write_all(fd, content)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    def append(self, path: Path, content: bytes, *, durable: bool = False) -> None:
        """All of it or nothing: what a full disk cut short is taken back."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
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
def locked(directory: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the directory's lock. Readers share it, and do without where they may not even open the file."""
    flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
    try:
        fd = os.open(directory / LOCK_NAME, flags | os.O_CLOEXEC, 0o640)
    except OSError:
        if not shared:
            raise
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
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
