"""`Key`: identifies a caller, with what it may do and how much. The secret itself is never kept, only its SHA-256.

A plain hash is enough because secrets are drawn with 256 random bits: they cannot be guessed.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from typing import Literal

import msgspec

PREFIX = "tonle-"
SECRET_BYTES = 32

Scope = Literal["models", "metrics", "priority", "gateway", "dashboard", "admin"]
SCOPES: tuple[Scope, ...] = ("models", "metrics", "priority", "gateway", "dashboard", "admin")


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None = the gateway's default for that limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None
    audio_seconds_per_minute: int | None = None  # these two are counted by each gateway for itself
    images_per_minute: int | None = None

    @functools.lru_cache(maxsize=1024)  # asked for every request; there are few different ones  # noqa: B019
    def over(self, default: KeyLimits) -> KeyLimits:
        """These, and `default` where these say nothing."""
        names = self.__struct_fields__
        own = {name: getattr(self, name) for name in names}
        return KeyLimits(**{name: getattr(default, name) if own[name] is None else own[name] for name in names})


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key. Keys with the same tenant share cached answers and prefixes; by default each is its own tenant."""

    id: str
    name: str
    digest: str  # SHA-256 of the secret, hex
    created: int  # unix seconds
    scopes: tuple[Scope, ...] = ("models",)
    models: tuple[str, ...] = ()  # empty = all
    limits: KeyLimits = KeyLimits()
    tenant: str = ""
    revoked: int | None = None  # unix seconds

    @property
    def owner(self) -> str:
        """Whose cached answers and prefixes it may see."""
        return self.tenant or self.id

    @property
    def is_gateway(self) -> bool:
        """It asks for others, and its X-Tonle-Salt says for whom. An admin's key has this scope only if it was given."""
        return "gateway" in self.scopes

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def draw(
    name: str,
    *,
    scopes: tuple[Scope, ...] = ("models",),
    models: tuple[str, ...] = (),
    limits: KeyLimits | None = None,
    tenant: str = "",
) -> tuple[Key, str]:
    """A new key and its secret, which is shown once and never kept."""
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    key = Key(
        id=f"key-{secrets.token_hex(5)}",
        name=name,
        digest=digest_of(secret),
        created=int(time.time()),
        scopes=scopes,
        models=models,
        limits=limits or KeyLimits(),
        tenant=tenant,
    )
    return key, secret


def given(secret: str, *, admin: bool) -> Key:
    """A key whose secret is in the settings. Its id follows from the secret: the same after a restart."""
    digest = digest_of(secret)
    scopes: tuple[Scope, ...] = ("models", "metrics", "admin") if admin else ("models", "metrics")
    return Key(id=f"key-{digest[:10]}", name="from the settings", digest=digest, created=0, scopes=scopes)


# The caller's key where none is configured: programs on this machine; or, where a server is open to all, any caller.
LOCAL_CALLER = Key(
    id="anonymous", name="no key", digest="", created=0, scopes=("models", "metrics", "priority", "dashboard", "admin")
)
ANONYMOUS_CALLER = Key(id="anonymous", name="no key", digest="", created=0, scopes=("models", "metrics", "priority"))
