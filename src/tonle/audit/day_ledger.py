"""The ledger of a day and its signed head: which files there are, in which order, and where the order ends.

`DAY/chain.jsonl` has one line per event, never changed, only appended to:

    {"seq":7,"kind":"record","time":…,"file":…,"hash":…,"sha256":…,"link":…}

`hash` is the record's own (`seal.py`), `sha256` that of the file's bytes, and `link` = SHA-256(link of the line
before + this line without its link). The first line of a day follows the last link of the day before. `DAY/head.json`
holds the last seq and link, signed: lines cut off the end are missed. `latest.json` holds the newest day, signed: a
whole last day cut off is missed.

Does: format, parse, link, sign. Does not: decide what is written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from tonle.audit.regular_file import read_regular
from tonle.audit.signing_keys import SigningKey

LEDGER_NAME = "chain.jsonl"
HEAD_NAME = "head.json"
LATEST_NAME = "latest.json"
HEAD_BYTES = 640  # every head has this length, so that one can be written over another
MAX_HEAD_BYTES = 64 * 1024  # of a file that is read as a head
MAX_NAME_BYTES = 255  # of a file, on every common file system
MAX_LEDGER_BYTES = 8 << 30  # a day of some 25 million requests
GENESIS = "0" * 64  # what the first line of the first day follows

# record · redacted: a field was removed · pruned: a day was removed · recovery: a crash was repaired · gap: requests
# that left no record, and why
Kind = Literal["record", "redacted", "pruned", "recovery", "gap"]

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what decoding a line or a head may raise
_LINK_CHARS = len(',"link":"') + 64 + len('"}')


class LedgerLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One event. `omit_defaults`: a line has only what its kind needs."""

    seq: int
    kind: Kind
    time: str
    after: str | None = None  # first line of a day: the day before it in the trail
    prev: str | None = None  # and that day's last link
    day: str | None = None  # redacted, pruned: the day it happened to
    file: str | None = None  # record, redacted
    hash: str | None = None  # record, redacted: the record's own hash; pruned: the day's last link
    sha256: str | None = None  # record, redacted: of the file's bytes
    facts: dict[str, Any] | None = None  # whatever else there is to say
    link: str = ""


class Head(msgspec.Struct, kw_only=True):
    kind: str  # day, latest
    day: str
    seq: int
    link: str
    time: str
    algorithm: str
    key: str  # fingerprint
    signature: str = ""

    def message(self) -> bytes:
        words = (
            "tonle audit head 1",
            self.kind,
            self.day,
            str(self.seq),
            self.link,
            self.time,
            self.algorithm,
            self.key,
        )
        return "\n".join(words).encode()


_encode = msgspec.json.Encoder().encode
_decode_line = msgspec.json.Decoder(LedgerLine).decode
_read_head = msgspec.json.Decoder(Head).decode


def link(line: LedgerLine, before: str) -> bytes:
    """Set the line's link and return it as text, newline included."""
    body = _encode(line)  # an empty link is a default, and left out
    line.link = link_of(body, before)
    return b'%b,"link":"%b"}\n' % (body[:-1], line.link.encode())


def link_of(body: bytes, before: str) -> str:
    return hashlib.sha256(before.encode() + b"\n" + body).hexdigest()


def body_of(text: bytes) -> bytes:
    """A line of the file without its newline, as it was before it got its link."""
    return text[:-_LINK_CHARS] + b"}"


def decode_line(text: bytes) -> LedgerLine:
    """Raises `msgspec.DecodeError` or `UnicodeDecodeError`, both of them a `ValueError`, whatever the line is."""
    try:
        return _decode_line(text)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None


def _decode_head(content: bytes) -> Head:
    try:
        return _read_head(content)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None


def is_file_name(name: str | None) -> bool:
    """Whether a ledger may name this: a file of the day's own folder, never a way out of it."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        return False
    return len(name.encode(errors="surrogatepass")) <= MAX_NAME_BYTES


def read_lines(content: bytes) -> list[tuple[bytes, LedgerLine]]:
    """Whole lines; raises `ValueError` naming the first that is none. A last line without its end is left out."""
    lines = []
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        try:
            lines.append((text, decode_line(text)))
        except UNREADABLE as error:
            raise ValueError(f"line {number}: {error}") from error
    return lines


def read_ledger(path: Path) -> bytes:
    """Empty if there is none. Raises `OddFileError`."""
    try:
        return read_regular(path, MAX_LEDGER_BYTES)
    except FileNotFoundError:
        return b""


def readable_lines(content: bytes) -> Iterator[LedgerLine]:
    """Whole lines, without those that cannot be read: `verify` names them."""
    for text in content.split(b"\n")[:-1]:
        with contextlib.suppress(*UNREADABLE):
            yield decode_line(text)


def last_line(content: bytes) -> LedgerLine | None:
    """The last whole line that can be read."""
    end = content.rfind(b"\n")
    while end > 0:
        start = content.rfind(b"\n", 0, end) + 1
        with contextlib.suppress(*UNREADABLE):
            return decode_line(content[start:end])
        end = start - 1
    return None


def sign_head(key: SigningKey, kind: str, day: str, seq: int, link: str) -> bytes:
    head = Head(
        kind=kind, day=day, seq=seq, link=link, time=now_text(), algorithm=key.algorithm, key=key.fingerprint
    )  # fmt: skip
    head.signature = key.sign(head.message())
    return msgspec.json.format(_encode(head), indent=2).ljust(HEAD_BYTES - 1) + b"\n"


def read_head(path: Path) -> Head | None:
    """None if there is none. Raises `ValueError` if it cannot be read."""
    try:
        return _decode_head(read_regular(path, MAX_HEAD_BYTES))
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise ValueError(str(error)) from error


def days_in(directory: Path) -> list[str]:
    """Names of the day folders, oldest first. A symbolic link is not one: it may lead anywhere. Raises `OSError`."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if is_day(entry.name) and entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def is_day(name: str) -> bool:
    return name.isascii() and _DAY.fullmatch(name) is not None


def text_of(moment_ns: int) -> str:
    """UTC, ISO 8601, microseconds."""
    second, rest_ns = divmod(moment_ns, 1_000_000_000)
    return f"{_second_text(second)}.{rest_ns // 1000:06d}Z"


@functools.lru_cache(maxsize=16)  # many records end in one second
def _second_text(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def now_text() -> str:
    return text_of(time.time_ns())


def today() -> str:
    return datetime.now(UTC).date().isoformat()
