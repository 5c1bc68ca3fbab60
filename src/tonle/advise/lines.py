"""`Line`: one piece of advice with its reason and the arithmetic behind it; `Section`: lines that belong together."""

from __future__ import annotations

import msgspec


class Line(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    verdict: str
    reason: str
    arithmetic: str = ""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    lines: list[Line]
