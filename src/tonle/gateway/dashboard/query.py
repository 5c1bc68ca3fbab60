"""Reading the query of a request for data.

Does: give texts, numbers and days, refuse what is none. Does not: know what they are for.
"""

from __future__ import annotations

import datetime
from urllib.parse import parse_qsl

from tonle.errors import InvalidRequest

MAX_TEXT = 1000  # characters of one value
MAX_FIELDS = 50


class Query:
    def __init__(self, text: str) -> None:
        """Of a name given twice, the last counts. Raises `InvalidRequest`."""
        try:
            self._values = dict(parse_qsl(text, max_num_fields=MAX_FIELDS))
        except ValueError:
            raise InvalidRequest(f"the query has more than {MAX_FIELDS} fields") from None

    def text(self, name: str) -> str:
        """Empty if absent. Raises `InvalidRequest`."""
        value = self._values.get(name, "")
        if len(value) > MAX_TEXT:
            raise InvalidRequest(f"{name} has {len(value)} characters; at most {MAX_TEXT} are searched for", param=name)
        return value

    def number(self, name: str, default: int, *, most: int) -> int:
        """Raises `InvalidRequest`."""
        value = self._values.get(name, "")
        if not value:
            return default
        if not value.isascii() or not value.isdigit() or len(value) > len(str(most)) or not 1 <= int(value) <= most:
            raise InvalidRequest(f"{name} must be a whole number from 1 to {most}, not {value[:20]!r}", param=name)
        return int(value)

    def day(self, name: str, default: datetime.date) -> datetime.date:
        """Raises `InvalidRequest`."""
        value = self._values.get(name, "")
        if not value:
            return default
        try:
            return datetime.date.fromisoformat(value)
        except ValueError:
            raise InvalidRequest(f"{name} must be a day such as 2026-01-31, not {value[:20]!r}", param=name) from None
