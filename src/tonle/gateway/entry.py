"""`Entry` and `Found`: one path of the server, and what answers it by method.

Does: hold. Does not: look a path up (`routes.py`, `dashboard/pages.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tonle.edge.exchange import Exchange
from tonle.gateway.api_keys.key import Scope

NO_KEYS = "this server has no keys, so it cannot be managed: start it with --admin-key KEY"

Handle = Callable[[Exchange], Awaitable[None]]


class Entry(NamedTuple):
    """One path and method."""

    scope: Scope | None  # of the key it needs
    handle: Handle
    takes_json: bool = False  # it has a body
    takes_form: bool = False  # it has a body with files: multipart/form-data
    is_piped: bool = False  # the pipeline answers it, refusals included: each has a record
    is_probe: bool = False  # asked again and again by machines: not worth a line in the log
    unless_keys: str | None = NO_KEYS  # with scope admin, why a server without keys refuses it; None: it does not


class Found(NamedTuple):
    """What a path leads to. `pattern` names it in metrics, so that the number of series stays bounded."""

    pattern: str
    methods: dict[str, Entry]
    headers: tuple[tuple[str, str], ...] = ()  # of every reply, errors included


NOTHING = Found("other", {})
