"""`trusted_key`: the key that a verification relies on, and where it comes from.

A key from the directory under test proves nothing about who wrote it: an author of forged records signs them with a key of
their own and leaves its public half there. So, in this order: a key file given by name, the key known of this trail outside its
directory (`known_trails.py`), and only then the key in the directory, which is said: first use. A pinned fingerprint turns the
last into a trusted key.

Does: choose, compare, say where from. Does not: check any signature.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from tonle.audit import known_trails
from tonle.audit.audit_options import KEY_NAME
from tonle.audit.findings import Findings
from tonle.audit.known_trails import KnownTrail
from tonle.audit.signing_keys import PUBLIC_NAME, SigningKey, load_key, public_key
from tonle.errors import ConfigError, TonleError

_FINGERPRINT = re.compile("[0-9a-f]{64}")


class TrustedKey(NamedTuple):
    key: SigningKey
    source: str  # in words
    first_use: bool


def fingerprint_of(text: str) -> str:
    """As people write it: case, colons and blanks do not matter. Raises `ConfigError`."""
    bare = re.sub(r"[:\s]", "", text).lower()
    if not _FINGERPRINT.fullmatch(bare):
        raise ConfigError(f"a fingerprint has 64 hex digits, not {text!r}", param="fingerprint")
    return bare


def check_fingerprint(key: SigningKey, wanted: str | None) -> None:
    """Raises `ConfigError` if the key is not the one that was pinned."""
    if wanted is not None and key.fingerprint != fingerprint_of(wanted):
        raise ConfigError(
            f"the key has the fingerprint {key.fingerprint}, not the one that was given ({wanted})", param="fingerprint"
        )


def trusted_key(
    directory: Path, known: KnownTrail | None, key_file: Path | None, fingerprint: str | None, found: Findings
) -> TrustedKey:
    """Raises `ConfigError` if there is no key at all."""
    beside = _keys_in(directory, found)
    chosen = _choose(directory, known, key_file, beside)
    pins = _pins(known, fingerprint)
    for pinned, words in pins:
        if chosen.key.fingerprint == pinned:
            chosen = TrustedKey(chosen.key, chosen.source if not chosen.first_use else words, first_use=False)
        else:
            found.add("key", PUBLIC_NAME, f"the key is {chosen.key.fingerprint} and not {pinned} ({words})")
    if chosen.first_use and (elsewhere := known_trails.find_key(chosen.key.fingerprint)) is not None:
        chosen = TrustedKey(chosen.key, f"known from the trail in {elsewhere.directory}", first_use=False)
    for name, key in beside.items():
        if key.fingerprint != chosen.key.fingerprint:
            found.add("key", name, f"it holds another key, {key.fingerprint}")
    return chosen


def words_for(known: KnownTrail) -> str:
    day = known.since[:10]
    if known.origin == "serve":
        return f"known since {day}: a server of this user signs with it"
    if known.origin == "given":
        return f"given by hand on {day}"
    return f"remembered since the first verification on {day}"


def _choose(
    directory: Path, known: KnownTrail | None, key_file: Path | None, beside: dict[str, SigningKey]
) -> TrustedKey:
    if key_file is not None:
        inside = Path(os.path.realpath(key_file)).is_relative_to(os.path.realpath(directory))
        return TrustedKey(load_key(key_file), f"from {key_file}", first_use=inside)
    if known is not None and known.public_key is not None:
        return TrustedKey(public_key(known.public_key), words_for(known), first_use=False)
    if known is not None and known.key_file is not None:
        return TrustedKey(load_key(Path(known.key_file)), words_for(known), first_use=False)
    for name, key in beside.items():
        return TrustedKey(key, f"from {name} in the directory itself", first_use=True)
    raise ConfigError(f"no key in {directory}; name the one that signs this trail with --key-file", param="key_file")


def _pins(known: KnownTrail | None, fingerprint: str | None) -> list[tuple[str, str]]:
    pins = [] if fingerprint is None else [(fingerprint_of(fingerprint), "its fingerprint was given")]
    return pins if known is None else [*pins, (known.fingerprint, words_for(known))]


def _keys_in(directory: Path, found: Findings) -> dict[str, SigningKey]:
    """By file name. The secret key may be out of an auditor's reach; the public one is there to be read."""
    keys = {}
    for name in (PUBLIC_NAME, KEY_NAME):
        if not os.path.lexists(directory / name):
            continue
        try:
            keys[name] = load_key(directory / name)
        except TonleError as error:
            if name == PUBLIC_NAME:
                found.add("unreadable", name, error.message)
    return keys
