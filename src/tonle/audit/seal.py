"""`seal`: what makes a record unchangeable and yet lets single fields of it be forgotten.

A record's hash is taken over digests, not over its text:

    digest(field) = SHA-256(salt of the field + JSON of its value)        for each field of SEALED
    digest(facts) = SHA-256(JSON of all other fields)
    hash          = SHA-256(version, seq, prev, digest(facts), digest(SEALED[0]), digest(SEALED[1]), ...)

To remove a field, its value and its salt go and its digest stays: the hash still comes out the same, and without the
salt a short value (a phone number) cannot be guessed from its digest. The salts of a fresh record come from one seed,
`chain.salt`; the first removal replaces the seed by the salts of the fields that remain, in `chain.salts`.

Does: pure functions from documents to documents. Does not: touch files.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from tonle.audit.plain_values import json_text
from tonle.audit.signing_keys import SigningKey
from tonle.errors import InvalidRequest

VERSION = 1
_SALT_BYTES = 16

# Fields that can be redacted one by one. Their order is part of the hash: a change is a new VERSION.
SEALED = (
    "system_prompt", "user_input", "messages", "prompt", "parameters", "output", "choices", "error", "client", "key_id",
    "request_id", "response_id",
)  # fmt: skip
CONTENT = ("system_prompt", "user_input", "messages", "prompt", "parameters", "output", "choices", "error")
REMOVED = "[redacted]"

_SEALED_SET = frozenset(SEALED)
_STARTS = range(0, _SALT_BYTES * len(SEALED), _SALT_BYTES)  # of a field's salt among all

_encode = msgspec.json.Encoder().encode
_sha256 = hashlib.sha256


class Plain(NamedTuple):
    """A document as JSON, before it has a place in the chain."""

    text: bytes  # all of it
    facts: bytes  # without the fields of SEALED
    sealed: list[bytes]  # the values of those, in their order


def seal(plain: Plain, key: SigningKey, *, seq: int, prev: str, file: str) -> tuple[bytes, str]:
    """A record with its place in the chain, as the bytes of a file, and its hash."""
    salt = secrets.token_bytes(_SALT_BYTES)
    stream = _stream(salt)
    digests = [
        _sha256(stream[start : start + _SALT_BYTES] + value).digest()
        for start, value in zip(_STARTS, plain.sealed, strict=True)
    ]
    number = _record_hash(seq, prev, file, _sha256(plain.facts).digest(), digests)
    chain = {
        "version": VERSION,
        "seq": seq,
        "prev": prev,
        "file": file,
        "salt": salt.hex(),
        "mac": key.mac(number.encode()),
        "hash": number,
    }
    return _format(b'%b,"chain":%b}' % (plain.text[:-1], _encode(chain))), number


def encode_fields(document: Mapping[str, Any]) -> Plain:
    """Of a document whose values are plain (`plain_values.py`), but for halves of surrogate pairs. Raises what an encoder
    raises if one is not."""
    facts = {name: value for name, value in document.items() if name not in _SEALED_SET}
    try:
        return Plain(_encode(document), _encode(facts), [_encode(document[name]) for name in SEALED])
    except UnicodeEncodeError:
        whole = {name: msgspec.json.decode(json_text(value)[0]) for name, value in document.items()}
        return encode_fields(whole)


def is_ours(content: bytes, key: SigningKey) -> bool:
    """Whether this very record was written with the key."""
    try:
        chain = chain_of(content)
        number = check(content)
        return number == chain["hash"] and hmac.compare_digest(key.mac(number.encode()), str(chain["mac"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def fields_of(content: bytes) -> Plain:
    """The fields of a record without its chain, ready to be sealed again. Raises `ValueError` if one is missing."""
    raw, _ = _open(content)
    if missing := _SEALED_SET - raw.keys():
        raise ValueError(f"the field {min(missing)} is missing")
    return Plain(_join(raw.items()), _join_facts(raw), [raw[name] for name in SEALED])


def check(content: bytes) -> str:
    """The hash that the record in `content` should have, from what is in it. Raises `ValueError` if it is no record."""
    raw, chain = _open(content)
    facts = _sha256(_join_facts(raw)).digest()
    digests = []
    salts = _salts(chain)
    redacted = chain.get("redacted", {})
    for name in SEALED:
        if name in redacted:
            digests.append(bytes.fromhex(redacted[name]["digest"]))
        elif name in raw and name in salts:
            digests.append(_sha256(salts[name] + raw[name]).digest())
        else:
            raise ValueError(f"the field {name} is missing")
    return _record_hash(int(chain["seq"]), str(chain["prev"]), str(chain["file"]), facts, digests)


def redact(content: bytes, replacements: Mapping[str, Any], *, reason: str, time: str) -> bytes:
    """The record with the values of some fields replaced. Its hash stays; `chain.redacted` says what happened to it."""
    raw, chain = _open(content)
    salts = _salts(chain)
    redacted = dict(chain.get("redacted", {}))
    for name, value in replacements.items():
        if name not in SEALED:
            raise InvalidRequest(f"{name} cannot be redacted; these can: {', '.join(SEALED)}", param=name)
        if name in salts:
            digest = _sha256(salts.pop(name) + raw[name]).hexdigest()
            redacted[name] = {"digest": digest, "time": time, "reason": reason}
        raw[name] = _encode(value)
    chain.pop("salt", None)
    chain["salts"] = {name: salt.hex() for name, salt in salts.items()}
    chain["redacted"] = redacted
    chain["hash"] = chain.pop("hash")  # last again
    return _format(_join([*raw.items(), ("chain", _encode(chain))]))


def chain_of(content: bytes) -> dict[str, Any]:
    """The `chain` of a record. Raises `ValueError` if there is none."""
    return _open(content)[1]


_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_chain = msgspec.json.Decoder(dict[str, Any]).decode


def _open(content: bytes) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The fields as compact JSON, which is what was digested, and the chain."""
    try:
        raw = {name: bytes(value) for name, value in _decode_raw(msgspec.json.format(content, indent=-1)).items()}
        chain = _decode_chain(raw.pop("chain"))
        if chain["version"] != VERSION:
            raise ValueError(f"it has version {chain['version']!r}; this program knows {VERSION}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from error
    except (KeyError, TypeError) as error:
        raise ValueError("it has no chain") from error
    return raw, chain


def _stream(seed: bytes) -> bytes:
    """The salts of all fields, one after the other."""
    return hashlib.shake_256(seed).digest(_SALT_BYTES * len(SEALED))


def _salts(chain: dict[str, Any]) -> dict[str, bytes]:
    """Of the fields that still have one."""
    if "salt" in chain:
        stream = _stream(bytes.fromhex(chain["salt"]))
        return {name: stream[start : start + _SALT_BYTES] for name, start in zip(SEALED, _STARTS, strict=True)}
    return {name: bytes.fromhex(salt) for name, salt in chain.get("salts", {}).items()}


def _join_facts(fields: Mapping[str, bytes]) -> bytes:
    return _join([pair for pair in fields.items() if pair[0] not in _SEALED_SET])


def _format(text: bytes) -> bytes:
    return msgspec.json.format(text, indent=2) + b"\n"


def _join(fields: Iterable[tuple[str, bytes]]) -> bytes:
    """JSON of an object whose values are JSON already. Names are ours and need no escapes."""
    return b"{%b}" % b",".join([b'"%b":%b' % (name.encode(), value) for name, value in fields])


def _record_hash(seq: int, prev: str, file: str, facts: bytes, digests: list[bytes]) -> str:
    head = f"tonle audit record {VERSION}\n{seq}\n{prev}\n{file}\n".encode()
    return _sha256(b"".join((head, facts, *digests))).hexdigest()
