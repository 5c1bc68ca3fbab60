"""`DiskTier`: blocks as files of one folder, which outlive the engine and may be shared by several.

A file is written under another name and then renamed, so that nobody reads half of one; what a crash leaves is removed
later. The folder is bounded in bytes, whoever wrote them: the files read or written longest ago are removed first. Files of
other engines are learnt of when they are asked for, and when the folder is listed again, once a minute while this engine writes.

The files are as private as the prompts they were computed from: only the user who runs the engine may read them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path

from tonle.engine.kv.tiers.stored_block import HEADER_BYTES, header_of, is_whole
from tonle.engine.kv.tiers.tier import TierCounts
from tonle.errors import ConfigError

log = logging.getLogger("tonle.engine")

_LIST_S = 60.0  # between two listings of the folder
_STALE_S = 600.0  # a file that was not renamed after so long never will be
_SUFFIX, _UNFINISHED = ".kv", ".part"
_FREE_SHARE = 0.9  # of the bound, to which the folder is brought when it is over


class DiskTier:
    name = "disk"

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises `ConfigError` if the folder cannot be written."""
        self.counts = TierCounts()
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # of `_sizes`
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by path within the folder, used longest ago first
        self._listed_s = 0.0
        self._failing = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f"probe-{os.getpid()}{_UNFINISHED}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"kv_offload_dir: cannot write to {folder}: {error.strerror}", param="kv_offload_dir"
            ) from None
        self._list()
        self._make_room(0)

    def load(self, key: bytes, out: memoryview) -> bool:
        place = _place(key)
        try:
            with (self._folder / place).open("rb", buffering=0) as file:
                header = file.read(HEADER_BYTES)
                size = _read_into(file.fileno(), out)
                more = os.fstat(file.fileno()).st_size - HEADER_BYTES - size
            if more or size != len(out) or not is_whole(header, key, out):
                self._damaged(place)
                return False
            os.utime(self._folder / place)  # it was used now: other engines go by this, too
        except FileNotFoundError:
            self._forget(place)
            return False
        except OSError as error:
            self._say(error)
            return False
        self._used(place, HEADER_BYTES + len(out))
        return True

    def save(self, key: bytes, data: memoryview) -> None:
        place = _place(key)
        if place in self._sizes:
            return
        if time.monotonic() - self._listed_s > _LIST_S:
            self._list()
        size = HEADER_BYTES + len(data)
        if size > self._max_bytes:
            return
        self._make_room(size)
        path = self._folder / place
        unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}{_UNFINISHED}")
        try:
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(header_of(key, data))
                file.write(data)
            unfinished.replace(path)
            self._failing = False
        except OSError as error:
            self._say(error)
            with contextlib.suppress(OSError):
                unfinished.unlink()
            return
        self._used(place, size)

    def close(self) -> None:
        pass

    def _make_room(self, size: int) -> None:
        """For a file of `size` bytes. Removes some more, so that not every save has to."""
        with self._lock:
            if self.counts.num_bytes + size <= self._max_bytes:
                return
            removed = []
            while self._sizes and self.counts.num_bytes + size > self._max_bytes * _FREE_SHARE:
                place, num_bytes = self._sizes.popitem(last=False)
                self._count(-1, -num_bytes)
                removed.append(place)
            self.counts.evicted += len(removed)
        for place in removed:
            with contextlib.suppress(OSError):  # another engine was faster
                (self._folder / place).unlink()

    def _list(self) -> None:
        """What is in the folder now, of all engines."""
        found = []
        stale_s = time.time() - _STALE_S
        for path in self._folder.glob("*/*/*"):
            with contextlib.suppress(OSError):  # removed meanwhile
                stat = path.stat()
                if path.suffix == _SUFFIX:
                    found.append((stat.st_mtime_ns, str(path.relative_to(self._folder)), stat.st_size))
                elif path.suffix == _UNFINISHED and stat.st_mtime < stale_s:
                    path.unlink()
        with self._lock:
            self._sizes = OrderedDict((place, size) for _, place, size in sorted(found))
            self.counts.num_blocks, self.counts.num_bytes = len(self._sizes), sum(self._sizes.values())
        self._listed_s = time.monotonic()

    def _damaged(self, place: str) -> None:
        self.counts.damaged += 1
        log.warning("%s is damaged: it is removed, and its tokens are computed again", self._folder / place)
        with contextlib.suppress(OSError):
            (self._folder / place).unlink()
        self._forget(place)

    def _used(self, place: str, size: int) -> None:
        """It is there, and was used now."""
        with self._lock:
            if place not in self._sizes:
                self._sizes[place] = size
                self._count(1, size)
            self._sizes.move_to_end(place)

    def _forget(self, place: str) -> None:
        with self._lock:
            if (size := self._sizes.pop(place, None)) is not None:
                self._count(-1, -size)

    def _say(self, error: OSError) -> None:
        """Once, until it works again."""
        self.counts.errors += 1
        if not self._failing:
            log.warning("KV blocks cannot be kept in %s: %s", self._folder, error.strerror)
        self._failing = True

    def _count(self, num_blocks: int, num_bytes: int) -> None:
        self.counts.num_blocks += num_blocks
        self.counts.num_bytes += num_bytes


def _place(key: bytes) -> str:
    """Within the folder: a folder per namespace, in it one per first byte."""
    namespace, digest = key[:16].hex(), key[16:].hex()
    return f"{namespace}/{digest[:2]}/{digest}{_SUFFIX}"


def _read_into(fd: int, out: memoryview) -> int:
    """How many bytes there were, at most as many as fit."""
    size = 0
    while size < len(out) and (count := os.readv(fd, [out[size:]])):
        size += count
    return size
