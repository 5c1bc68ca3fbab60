"""`Fallbacks`: the models that answer when all backends of another are out, as they are now.

Does: hold the table, which an admin may replace. Does not: decide whether a model's backends are out (`pipeline.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tonle.config.fallbacks import fallback_chains


class Fallbacks:
    def __init__(self, table: Mapping[str, Sequence[str]], aliases: Mapping[str, str]) -> None:
        """Raises `ConfigError` for a loop."""
        self._aliases = aliases
        self.replace(table)

    def replace(self, table: Mapping[str, Sequence[str]]) -> None:
        """Raises `ConfigError` for a loop; then the old one stays."""
        self._chains = fallback_chains(table, self._aliases)
        self.table = {name: list(others) for name, others in table.items()}

    def after(self, names: Sequence[str], last: str | None) -> tuple[str, ...]:
        """In place of the first of `names` that has any; of these, only those after `last`."""
        chain = next((found for name in names if (found := self._chains.get(name))), ())
        return chain[chain.index(last) + 1 :] if last in chain else chain
