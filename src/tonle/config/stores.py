"""Settings that name a place to keep things: a file, Redis or PostgreSQL.

Does: tell them apart, refuse anything else, keep passwords out of messages. Does not: connect.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from tonle.config.values import ValueType

REDIS = ("redis", "rediss")
POSTGRES = ("postgresql", "postgres")
MEMORY = "memory"
SAME = "auto"

_ON, _OFF = ("memory", "true", "yes", "on", "1"), ("off", "none", "false", "no", "0")


def scheme_of(place: str) -> str:
    """`redis`, `postgresql`, …; empty for a file."""
    return place.partition("://")[0].lower() if "://" in place else ""


def place_of(url: str) -> str:
    """Where a URL leads, fit for logs: without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def state_place() -> ValueType:
    """A file, or a server that several gateways share."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError(f"must be a file or a URL, not {value!r}")
        if scheme_of(value) not in ("", *REDIS, *POSTGRES):
            raise ValueError(
                f"must be a file, redis://host:6379/0 or postgresql://host/database, not {place_of(value)!r}"
            )
        return value

    return ValueType("PLACE", read, lambda place: place_of(place) if scheme_of(place) else place)


def redis_url() -> ValueType:
    def read(value: object) -> str:
        if not isinstance(value, str) or scheme_of(value) not in REDIS:
            raise ValueError(f"must be a URL such as redis://host:6379/0, not {place_of(str(value))!r}")
        return value

    return ValueType("URL", read, place_of)


def responses_place() -> ValueType:
    """As for the cache; or `SAME`, where the cache is."""
    place = cache_place()

    def read(value: object) -> str | None:
        if str(value).strip().lower() == SAME:
            return SAME
        try:
            found: str | None = place.read(value)
            return found
        except ValueError as error:
            raise ValueError(str(error).replace("must be memory", f"must be {SAME}, memory")) from None

    return ValueType("PLACE", read, place.show)


def cache_place() -> ValueType:
    """Memory of this process, a Redis that several gateways share, or nowhere (None)."""

    def read(value: object) -> str | None:
        word = str(value).strip().lower()  # YAML reads on and off as true and false
        if value is None or word in _OFF:
            return None
        if word in _ON:
            return MEMORY
        if isinstance(value, str) and scheme_of(value) in REDIS:
            return value
        shown = place_of(value) if isinstance(value, str) and scheme_of(value) else value
        raise ValueError(f"must be memory, off or redis://host:6379/0, not {shown!r}")

    return ValueType(
        "PLACE", read, lambda place: "off" if place is None else place_of(place) if "://" in place else place
    )
