"""`/admin/fallbacks`: which models answer in place of others, read and replaced while the gateway runs."""

from __future__ import annotations

import msgspec

from tonle.config.fallbacks import Table
from tonle.edge.exchange import Exchange
from tonle.gateway.backend_admin import UNTIL_RESTART
from tonle.gateway.routing.fallbacks import Fallbacks
from tonle.protocol.parse import parse

PATH = "/admin/fallbacks"


class FallbackTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of PUT: the whole table, in place of the one there is."""

    fallbacks: Table


class FallbackAdmin:
    def __init__(self, fallbacks: Fallbacks) -> None:
        self._fallbacks = fallbacks

    async def show(self, exchange: Exchange) -> None:
        exchange.reply(msgspec.json.encode({"fallbacks": self._fallbacks.table}))

    async def replace(self, exchange: Exchange) -> None:
        asked, _ = parse(exchange.body, FallbackTable)
        self._fallbacks.replace(asked.fallbacks)
        exchange.reply(msgspec.json.encode({"fallbacks": self._fallbacks.table, "kept": UNTIL_RESTART}))
