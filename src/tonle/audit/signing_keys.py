"""`SigningKey`: the secret that signs the heads of the chain.

Does: create, load, sign, check. Two algorithms, told apart by the key file's first word:

- `ed25519` (made when the package `cryptography` is there, `pip install 'tonle[audit]'`): the public half, written
  beside the trail as `audit.pub`, checks signatures and cannot make them. An auditor needs no secret.
- `hmac-sha256` (needs nothing): a key that checks can also forge, so the key must stay with the server and the
  auditor.

Neither helps against a reader of the secret key; keep it out of the audit directory (`key_file`) where that
matters.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonle.audit.regular_file import OddFileError, read_regular
from tonle.errors import ConfigError

HMAC = "hmac-sha256"
ED25519 = "ed25519"
PUBLIC = "ed25519-public"
PUBLIC_NAME = "audit.pub"
MAX_KEY_BYTES = 4096  # of a key file
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class SigningKey:
    """`secret` is the key of HMAC, the seed of Ed25519, or (algorithm `ed25519-public`) only the public half."""

    algorithm: str
    secret: bytes

    @property
    def can_sign(self) -> bool:
        return self.algorithm != PUBLIC

    @property
    def fingerprint(self) -> str:
        """Names the key in heads, reports and settings; tells nothing about it. 64 hex digits: whoever pins it relies on
        it, so no other key may have the same."""
        seen = (
            self.public_bytes if self.algorithm != HMAC else hashlib.sha256(b"tonle audit key\n" + self.secret).digest()
        )
        return hashlib.sha256(seen).hexdigest()

    @property
    def public_bytes(self) -> bytes:
        if self.algorithm == ED25519:
            return bytes(_private(self.secret).public_key().public_bytes_raw())
        return self.secret

    def sign(self, message: bytes) -> str:
        if self.algorithm == HMAC:
            return hmac.digest(self.secret, message, "sha256").hex()
        if self.algorithm == ED25519:
            return bytes(_private(self.secret).sign(message)).hex()
        raise ConfigError("a public key checks signatures and cannot make them; give the secret key's file")

    def mac(self, message: bytes) -> str:
        """Marks what a holder of the secret wrote, cheaper than a signature; only recovery after a crash looks at it."""
        if not self.can_sign:
            raise ConfigError("a public key checks signatures and cannot make them; give the secret key's file")
        return hashlib.blake2b(message, key=_mac_key(self.secret), digest_size=32).hexdigest()  # 5x faster than HMAC

    def check(self, message: bytes, signature: str) -> bool:
        if self.algorithm == HMAC:
            return hmac.compare_digest(self.sign(message).encode(), signature.encode(errors="replace"))
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.public_bytes).verify(bytes.fromhex(signature), message)
        except (InvalidSignature, ValueError):
            return False
        return True


def load_key(file: Path) -> SigningKey:
    """Raises `ConfigError`."""
    try:
        # Links are followed: that is how secrets are mounted.
        content = read_regular(file, MAX_KEY_BYTES, follow_links=True)
        algorithm, _, text = content.decode("ascii").strip().partition(" ")
        secret = bytes.fromhex(text)
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read the audit key {file}: {error.strerror}", param="key_file") from error
    except OddFileError as error:
        raise ConfigError(f"cannot read the audit key {file}: {error}", param="key_file") from error
    except ValueError as error:
        raise ConfigError(
            f"{file} is no audit key: it must hold an algorithm and a key in hex", param="key_file"
        ) from error
    if algorithm not in (HMAC, ED25519, PUBLIC) or len(secret) != _KEY_BYTES:
        raise ConfigError(f"{file} is no audit key: {algorithm[:40]!r} with {len(secret)} bytes", param="key_file")
    if algorithm != HMAC and not _has_cryptography():
        raise ConfigError(f"{file} is an {algorithm} key; install tonle[audit] to use it", param="key_file")
    return SigningKey(algorithm, secret)


def load_or_create_key(file: Path, directory: Path) -> SigningKey:
    """The key in `file`; a new one, readable by its owner only, if there is none. Several may call this at once."""
    if not file.exists():
        algorithm = ED25519 if _has_cryptography() else HMAC
        file.parent.mkdir(parents=True, exist_ok=True)
        mine = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        fd = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, f"{algorithm} {secrets.token_hex(_KEY_BYTES)}\n".encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        with contextlib.suppress(FileExistsError):
            os.link(mine, file)  # unlike a rename it never replaces what another process made
        mine.unlink()
    key = load_key(file)
    if key.algorithm == ED25519:
        _publish(directory, f"{PUBLIC} {key.public_bytes.hex()}\n")
    return key


def public_key(hex_digits: str) -> SigningKey:
    """The public half of an Ed25519 key. Raises `ConfigError`."""
    if not _has_cryptography():
        raise ConfigError("the trail is signed with an ed25519 key; install tonle[audit] to check it", param="key_file")
    return SigningKey(PUBLIC, bytes.fromhex(hex_digits))


def _publish(directory: Path, text: str) -> None:
    """By a rename, which replaces what has the name: writing would follow a link, or wait for the reader of a FIFO."""
    file = directory / PUBLIC_NAME
    with contextlib.suppress(FileNotFoundError, OddFileError):
        if read_regular(file, MAX_KEY_BYTES) == text.encode():
            return
    mine = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    mine.write_text(text, encoding="ascii")
    mine.rename(file)


def _has_cryptography() -> bool:
    from importlib.util import find_spec

    return find_spec("cryptography") is not None


def _private(seed: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(seed)


@functools.cache
def _mac_key(secret: bytes) -> bytes:
    return hashlib.sha256(b"tonle audit mac\n" + secret).digest()
