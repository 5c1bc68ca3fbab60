"""`KnownTrail`: what this user remembers of a trail, outside its directory: the key that signs it and how far it went.

Like a shell's list of known hosts. The key that judges a directory must not come from that directory, and nothing in a
directory can show that all of it was put back to an earlier copy. One small file per trail, named after the directory's path,
in $XDG_STATE_HOME/tonle/audit (~/.local/state/tonle/audit).

Does: read, write, compare. Does not: decide what a difference means (`trusted_key.py`, `verify.py`), or when to write
(`anchor_keeper.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from tonle.audit import day_ledger
from tonle.audit.day_ledger import Head
from tonle.audit.regular_file import read_regular
from tonle.audit.signing_keys import HMAC, SigningKey
from tonle.config.state_dir import state_dir
from tonle.errors import ConfigError

# serve: a server of this user signs with the key · verify: found in the directory by the first verification, and confirmed by
# nothing · given: named by hand, as a key file or a fingerprint, or accepted with `tonle audit trust`
Origin = Literal["serve", "verify", "given"]

_MAX_BYTES = 64 * 1024
_MAX_TRAILS = 10_000  # that are looked through for a key


class KnownTrail(msgspec.Struct, kw_only=True, frozen=True):
    directory: str
    fingerprint: str
    public_key: str | None  # hex; None where there is no public half
    key_file: str | None  # the signing key, if it is kept outside the directory
    origin: Origin
    since: str
    head: Head | None = None  # the anchor: the end of the chain when it was last looked at
    ledger_bytes: int = 0  # where that line ends in its day's ledger


_decode = msgspec.json.Decoder(KnownTrail).decode


def describe(directory: Path, key: SigningKey, origin: Origin, *, key_file: Path | None = None) -> KnownTrail:
    """A trail that was not known before."""
    inside = key_file is None or Path(os.path.realpath(key_file)).is_relative_to(os.path.realpath(directory))
    return KnownTrail(
        directory=os.path.realpath(directory),
        fingerprint=key.fingerprint,
        public_key=None if key.algorithm == HMAC else key.public_bytes.hex(),
        key_file=None if inside else str(Path(str(key_file)).absolute()),
        origin=origin,
        since=day_ledger.now_text(),
    )


def path_of(directory: Path) -> Path:
    """Raises `OSError` if this user has no place for state."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:32]
    return _folder() / f"{name}.json"


def find(directory: Path) -> KnownTrail | None:
    """Raises `ConfigError` if what is remembered cannot be read."""
    try:
        path = path_of(directory)
    except OSError:
        return None
    try:
        return _decode(read_regular(path, _MAX_BYTES))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        advice = "Restore it, or accept the trail as it is now with `tonle audit trust`"
        raise ConfigError(f"what is known of this trail, {path}, cannot be read: {error}. {advice}") from error


def find_key(fingerprint: str) -> KnownTrail | None:
    """Another trail with this key, if the key was more than found in a directory."""
    for path in _files():
        with contextlib.suppress(OSError, ValueError, RecursionError):
            known = _decode(read_regular(path, _MAX_BYTES))
            if known.fingerprint == fingerprint and known.origin != "verify":
                return known
    return None


def update(directory: Path, change: Callable[[KnownTrail | None], KnownTrail | None]) -> KnownTrail | None:
    """Replace what is known by what `change` makes of it; None leaves it. One process at a time. Raises `OSError`."""
    path = path_of(directory)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(path.parent):
        try:
            known = find(directory)
        except ConfigError as error:
            raise OSError(error.message) from error
        new = change(known)
        if new is None or new == known:
            return known
        replace(path, new)
        return new


def replace(path: Path, known: KnownTrail) -> None:
    """Whole or not at all. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mine = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, msgspec.json.format(msgspec.json.encode(known), indent=2) + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    mine.rename(path)


def _folder() -> Path:
    try:
        return state_dir() / "audit"
    except RuntimeError as error:  # no home directory
        raise OSError(f"{error}; set XDG_STATE_HOME") from error


def _files() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for number, path in enumerate(sorted(_folder().glob("*.json"))):
            if number >= _MAX_TRAILS:
                return
            yield path


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
