"""The field `priority` of a request: which values there are, and what they mean. Lower goes first.

Does: read. Does not: decide who may ask for which (`gateway/parsed_request.py`), or order requests.
Gateway and replica both read by this table, so that no spelling means one thing here and another there. The words are
compared as they are: changing the case of a text that is not ASCII can turn another word into one of these.
"""

from __future__ import annotations

from typing import Any

CRITICAL, HIGH, NORMAL, LOW = range(4)
WORDS = ("critical", "high", "normal", "low")
PRIORITIES: dict[str, int] = {
    spelled: number for number, word in enumerate(WORDS) for spelled in (word, word.upper())
}  # "high" or "HIGH", not "High"
EXPECTED = f"{', '.join(WORDS)} or {CRITICAL} to {LOW}"  # for messages


def read_priority(asked: Any) -> int | None:
    """None: it is not one."""
    if isinstance(asked, str):
        return PRIORITIES.get(asked)
    if isinstance(asked, int) and not isinstance(asked, bool) and CRITICAL <= asked <= LOW:
        return asked
    return None
