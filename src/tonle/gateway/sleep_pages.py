"""Putting the engine of this server to sleep and waking it, with vLLM's paths: /sleep, /wake_up, /is_sleeping.

Does: read what is asked, have it done. Does not: check the caller's key (`routes.py`), or know how an engine sleeps.
"""

from __future__ import annotations

from typing import Protocol
from urllib.parse import parse_qs

import msgspec

from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest


class Sleeper(Protocol):
    @property
    def is_sleeping(self) -> bool: ...
    async def sleep(self, level: int) -> None: ...
    async def wake_up(self) -> None: ...


class SleepPages:
    def __init__(self, sleeper: Sleeper) -> None:
        self._sleeper = sleeper

    async def sleep(self, exchange: Exchange) -> None:
        """POST /sleep?level=1|2. Requests under way end."""
        asked = parse_qs(exchange.query)
        level = asked.get("level", ["1"])[-1]
        if (mode := asked.get("mode", ["abort"])[-1]) != "abort":
            raise InvalidRequest(f"mode must be abort: requests under way end, not {mode[:20]!r}", param="mode")
        if level not in ("1", "2"):
            raise InvalidRequest(f"level must be 1 or 2, not {level[:20]!r}", param="level")
        await self._sleeper.sleep(int(level))
        exchange.reply(b"{}")

    async def wake_up(self, exchange: Exchange) -> None:
        """POST /wake_up. Replies when requests are answered again."""
        if "tags" in parse_qs(exchange.query):
            raise InvalidRequest("tags are not supported: weights and keys and values wake together", param="tags")
        await self._sleeper.wake_up()
        exchange.reply(b"{}")

    async def is_sleeping(self, exchange: Exchange) -> None:
        exchange.reply(msgspec.json.encode({"is_sleeping": self._sleeper.is_sleeping}))
