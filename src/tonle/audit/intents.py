"""`Intents`: requests being served right now, kept where they outlive a killed process.

Every opened record leaves one line in a file that is mapped into memory: writing it is a copy without a call of the
system, and the kernel keeps it when the process dies. What has a line here and no record in the trail was
interrupted; recovery writes that record.

Does: remember openings, forget those that are written, create removed files again. Does not: survive a power
cut; nothing unflushed does. The files are bounded: while the disk refuses and they pile up, bodies are left out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tonle.audit.disk import TEMP_PREFIX
from tonle.audit.plain_values import said
from tonle.audit.record import ID_BYTES, Record
from tonle.audit.redaction import Redactor
from tonle.audit.signing_keys import SigningKey

FOLDER_NAME = "open"
SUFFIX = ".log"  # of a page; a draft has none
FILE_BYTES = 4 * 1024**2
MAX_BODY_BYTES = 64 * 1024  # of a request that is remembered whole
MAX_PAGES = 16  # with more in use, requests are remembered without their bodies
NUM_TRIES = 5  # to make a file while another process removes what looks left behind


class Intent(msgspec.Struct, array_like=True):
    """What was known when the record was opened."""

    id: str
    opened_ns: int
    endpoint: str
    request_id: str
    client: str | None
    body: str | None


class _Draft:
    """A page's file before it has its name. Recovery, which takes an unlocked page for a dead process's, never sees one
    that is not locked yet."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError`."""
        self._path = path
        self._temp = path.with_name(f"{TEMP_PREFIX}{path.stem}")
        self.fd = self._locked_file()
        try:
            # Real blocks, not a hole: a copy into a hole on a full disk would kill the process.
            os.posix_fallocate(self.fd, 0, FILE_BYTES)
            self.map = mmap.mmap(self.fd, FILE_BYTES)
        except OSError:
            os.close(self.fd)
            self._temp.unlink(missing_ok=True)
            raise

    def _locked_file(self) -> int:
        for _ in range(NUM_TRIES):
            fd = os.open(self._temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)  # ends with the process: a process that can take it knows that we died
            if _is_at(self._temp, fd):
                return fd
            os.close(fd)  # `remove_drafts` was quicker than our lock
        raise OSError(errno.EAGAIN, "a file was removed again and again while it was made", str(self._temp))

    def publish(self) -> None:
        """Give it its name. Raises `OSError`; then the draft is gone."""
        try:
            self._temp.rename(self._path)
        except OSError:
            self.map.close()
            os.close(self.fd)
            self._temp.unlink(missing_ok=True)
            raise


class Page:
    """One mapped file; removed when it is full and all its requests are on record."""

    __slots__ = ("_fd", "_lock", "_map", "is_full", "num_open", "path", "used")

    def __init__(self, path: Path) -> None:
        """Raises `OSError`."""
        draft = _Draft(path)
        draft.publish()
        self.path = path
        self._fd, self._map = draft.fd, draft.map
        self._lock = threading.Lock()  # lines are added on one thread, the file is replaced on another
        self.used = 0  # bytes
        self.num_open = 0
        self.is_full = False

    def add(self, line: bytes) -> int:
        """Where it begins; -1 if there is no room for it."""
        start = self.used
        if start + len(line) > FILE_BYTES:
            self.is_full = True
            return -1
        with self._lock:
            self._map[start : start + len(line)] = line
            self.used += len(line)
        self.num_open += 1
        return start

    def void(self, start: int) -> None:
        """The line is none any more: its mark no longer fits."""
        with self._lock:
            self._map[start] = ord("-")

    @property
    def is_missing(self) -> bool:
        """The file was removed: the lines live as long as this process, and no other process can find them."""
        return not _is_at(self.path, self._fd)

    def restore(self) -> None:
        """The same lines in a new file of the same name. Raises `OSError`; then all is as before."""
        draft = _Draft(self.path)
        with self._lock:
            draft.map[: self.used] = self._map[: self.used]
            draft.publish()
            old_fd, old_map = self._fd, self._map
            self._fd, self._map = draft.fd, draft.map
        old_map.close()
        os.close(old_fd)

    def remove(self) -> None:
        self._map.close()
        os.close(self._fd)
        self.path.unlink(missing_ok=True)


Place = tuple[Page, int]  # of a line, and the byte where it begins


class Intents:
    """Opened on the event loop, forgotten on the trail's thread: the only shared number is a page's count."""

    def __init__(
        self, directory: Path, key: SigningKey, *, redactor: Redactor | None = None, omit: tuple[str, ...] = ()
    ) -> None:
        """With rules for masking, or fields that are left out, the request's body is not kept here."""
        self._folder = directory / FOLDER_NAME
        self._folder.mkdir(exist_ok=True)
        self._key = key
        self._redactor = redactor or Redactor(())
        self._omit = omit
        self._with_content = not (self._redactor or omit)
        self._prefix = f"{os.getpid()}-{secrets.token_hex(ID_BYTES)}"
        self._num_pages = 0
        self._page: Page | None = self._new_page()
        self._pages: list[Page] = [self._page]

    @property
    def owner(self) -> str:
        """A file that is locked as long as this process lives. For the trail's thread."""
        return str(self._pages[0].path)

    def add(self, record: Record) -> None:
        """Never raises: a disk that is full is the writer's to report."""
        body, raw = None, record.body
        if type(raw) is bytes and len(raw) <= MAX_BODY_BYTES and self._with_content and len(self._pages) <= MAX_PAGES:
            body = raw.decode(errors="replace")
        try:
            encoded = _encode(self._intent(record, body))
        except Exception:  # facts of an unexpected type
            encoded = _encode(self._intent(record, body, said))
        line = b"%b %b\n" % (self._key.mac(encoded).encode(), encoded)
        page = self._page
        start = -1 if page is None else page.add(line)
        if start < 0:
            with contextlib.suppress(OSError):
                page = self._page = self._new_page()
                self._pages.append(page)
                start = page.add(line)
        if page is not None and start >= 0:
            record.intent = (page, start)

    def _intent(self, record: Record, body: str | None, text_of: Callable[[Any], Any] | None = None) -> Intent:
        request_id, client, endpoint = record.request_id, record.client, record.endpoint
        if not self._with_content:
            request_id, client = self._allowed("request_id", request_id) or "", self._allowed("client", client)
        if text_of is not None:
            client = None if client is None else text_of(client)
            endpoint, request_id = text_of(endpoint), text_of(request_id)
        return Intent(record.id, record.opened_ns, endpoint, request_id, client, body)

    def _allowed(self, field: str, value: str | None) -> str | None:
        if field in self._omit:
            return None
        masked = self._redactor.mask(value, Counter(), field=field)
        return None if masked is None else str(masked)

    def forget(self, record: Record) -> None:
        """The record is written, or its loss is."""
        place, record.intent = record.intent, None
        if place is not None:
            place[0].num_open -= 1

    def void(self, places: Iterable[Place]) -> None:
        """These requests are on record in another way: recovery is not to write a record for any of them."""
        for page, start in places:
            page.void(start)
            page.num_open -= 1

    def sweep(self) -> None:
        """Remove files that are not needed any more."""
        for page in [page for page in self._pages if page.is_full and page.num_open <= 0 and page is not self._page]:
            self._pages.remove(page)
            page.remove()

    def restore(self) -> int:
        """Create removed files again, on the trail's thread. Returns how many. Raises `OSError`."""
        missing = [page for page in self._pages if page.is_missing]
        for page in missing:
            self._folder.mkdir(exist_ok=True)
            page.restore()
        return len(missing)

    def close(self) -> None:
        """Everything is on record."""
        for page in self._pages:
            page.remove()
        self._pages.clear()
        self._page = None

    def _new_page(self) -> Page:
        self._num_pages += 1
        return Page(self._folder / f"{self._prefix}-{self._num_pages}{SUFFIX}")


class LeftBehind(NamedTuple):
    """What processes that died were doing."""

    requests: list[Intent]
    files: list[Path]  # that tell of them
    unreadable: list[tuple[Path, bytes]]  # lines that have our mark and make no sense


def left_behind(directory: Path, key: SigningKey) -> LeftBehind:
    """Requests of processes that died. Lines without our mark are passed over."""
    left = LeftBehind([], [], [])
    for path in sorted((directory / FOLDER_NAME).glob(f"*{SUFFIX}")):
        if not path.is_file():
            continue
        with path.open("rb+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # its process lives
            for line in file.read(FILE_BYTES).partition(b"\0")[0].split(b"\n"):
                mark, _, encoded = line.partition(b" ")
                if not encoded or not secrets.compare_digest(mark, key.mac(encoded).encode()):
                    continue
                try:
                    left.requests.append(_decode(encoded))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    left.unreadable.append((path, line))
            left.files.append(path)
    return left


def remove_drafts(directory: Path) -> None:
    """Files of processes that died before they named them. Removed under their lock: see `_Draft`."""
    for path in (directory / FOLDER_NAME).glob(f"{TEMP_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # its process lives
            if _is_at(path, file.fileno()):
                path.unlink()


def _is_at(path: Path, fd: int) -> bool:
    """Whether the open file is the one of that name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


_encode: Any = msgspec.json.Encoder().encode
_decode: Any = msgspec.json.Decoder(Intent).decode
