"""Which model answers when all backends of another are out: `fallbacks: {large: [medium, small]}`.

Does: read the table, follow it to its ends, refuse loops. Does not: know which backends are out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tonle.config.routing import Name, read_yaml
from tonle.config.values import ValueType
from tonle.errors import ConfigError

Table = dict[Name, list[Name]]
MAX_CHAIN = 64  # models, one in place of the other
_WANTED = "models and those that answer in their place, such as {large: [medium, small]}"


def fallback_table() -> ValueType:
    def read(value: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
        items: Any = read_yaml(value) if isinstance(value, str) else value
        if isinstance(items, dict):  # one name need not stand in a list
            items = {name: [others] if isinstance(others, str) else others for name, others in items.items()}
        try:
            found = msgspec.convert(items, Table)
        except msgspec.ValidationError as error:
            raise ValueError(f"must be {_WANTED}: {error}") from None
        return tuple((name, tuple(others)) for name, others in found.items())

    return ValueType("YAML", read, lambda rows: ", ".join(f"{name}: {'/'.join(others)}" for name, others in rows))


def fallback_chains(
    table: Mapping[str, Sequence[str]], aliases: Mapping[str, str] | None = None
) -> dict[str, tuple[str, ...]]:
    """For each model all that may answer in its place, in order: each that is named, then those of that one. Raises `ConfigError`
    for a loop, also one that goes through an alias."""
    known = dict(aliases or {})
    real = {known.get(name, name): others for name, others in table.items()}
    done: dict[str, dict[str, None]] = {}
    return {name: tuple(_followed(name, real, known, (name,), done)) for name in table}


def _followed(
    name: str, table: Mapping[str, Sequence[str]], aliases: Mapping[str, str], path: tuple[str, ...],
    done: dict[str, dict[str, None]],
) -> dict[str, None]:  # fmt: skip
    """In order. `done`: those of models that were followed before, so that many ways to one cost no more than one."""
    own = aliases.get(name, name)
    if own in done:
        return done[own]
    if len(path) > MAX_CHAIN:
        raise ConfigError(f"fallbacks: the chain of {path[0]} is longer than {MAX_CHAIN}", param="fallbacks")
    found: dict[str, None] = {}
    passed = {aliases.get(each, each) for each in path}
    for other in table.get(own, ()):
        if aliases.get(other, other) in passed:
            raise ConfigError(f"fallbacks: {' → '.join((*path, other))} is a loop; a model cannot answer in its own place",
                              param="fallbacks")  # fmt: skip
        found |= {other: None} | _followed(other, table, aliases, (*path, other), done)
    done[own] = found
    return found
