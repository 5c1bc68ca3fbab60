"""`Knob`: one setting as users meet it, made from a field of a settings table.

A unit at the end of a field's name (`_s`, `_bytes`) is not part of its public name, because there a value carries its
own: field `drain_s`, file key `drain: 30s`, variable `TONLE_DRAIN=30s`, flag `--drain 30s`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from tonle.config import kinds
from tonle.config.kinds import Kind

ENV_PREFIX = "TONLE_"


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting as users meet it."""

    field: str  # of the table
    default: Any
    kind: Kind
    group: str  # heading in help texts
    help: str
    engine: str | None = None  # the field of EngineConfig it sets
    option: str | None = None  # the flag's name, where it is not the file's key

    @property
    def name(self) -> str:
        """The key in a file."""
        return re.sub("_(s|bytes)$", "", self.field)

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + (self.option or self.name).replace("_", "-")


def knob(
    group: str, default: Any, kind: Kind, help: str, *, engine: str | None = None, option: str | None = None
) -> Any:
    """A field of a table."""
    return field(
        default=default, metadata={"kind": kind, "group": group, "help": help, "engine": engine, "option": option}
    )


def knobs_of(table: type[Any]) -> dict[str, Knob]:
    """By public name, in the order of the table; what it shares with other tables comes last."""
    entries = sorted(fields(table), key=lambda entry: entry.name not in table.__annotations__)
    found = (Knob(field=entry.name, default=entry.default, **entry.metadata) for entry in entries)
    return {each.name: each for each in found}


# -- knobs that more than one table has

FRONT_DOOR = "Front door"


def api_key() -> Any:
    return knob(
        FRONT_DOOR, (), kinds.names(), "A key that callers must send as a bearer token. Give it several times for more."
    )


def trusted_proxies() -> Any:
    return knob(
        FRONT_DOOR,
        (),
        kinds.networks(),
        "Proxies whose word on a caller's address is taken: addresses or networks. None by default.",
    )


def forwarded_header() -> Any:
    return knob(
        FRONT_DOOR,
        "x-forwarded-for",
        kinds.choice("x-forwarded-for", "forwarded"),
        "The header in which they give it; the other one is never read.",
    )
