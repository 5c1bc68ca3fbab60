"""`ReplicaList`: the list of replicas over HTTP, for gateways: GET /backends.

Does: answer with what `tonle gateway --discovery http://HOST:PORT/backends` reads. Does not: tell or change anything else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from tonle.config.routing import BackendConfig
from tonle.edge.exchange import Exchange
from tonle.edge.listening import bind, local_url
from tonle.edge.server import HttpServer, ServerLimits
from tonle.errors import ConfigError

PATH = "/backends"
_BIND_S = 15.0  # an earlier controller may not have let go of the port yet
_RETRY_S = 0.25


class ReplicaList:
    def __init__(self, listed: Callable[[], Sequence[BackendConfig] | None]) -> None:
        self._listed = listed
        self._server = HttpServer(self._handle, ServerLimits(max_body_bytes=1024))
        self.url = ""

    async def start(self, host: str, port: int) -> None:
        """Raises `ConfigError`."""
        ends_s = time.monotonic() + _BIND_S
        while True:
            try:
                listener = bind(host, port)
                break
            except ConfigError:
                if time.monotonic() > ends_s:
                    raise
                await asyncio.sleep(_RETRY_S)
        await self._server.start(listener)
        self.url = f"{local_url(host, listener.getsockname()[1])}{PATH}"

    async def stop(self) -> None:
        await self._server.stop(drain_s=1.0)

    async def _handle(self, exchange: Exchange) -> None:
        if exchange.path != PATH or exchange.method != "GET":
            exchange.reply(msgspec.json.encode({"error": {"message": f"there is only GET {PATH}"}}), status=404)
        elif (rows := self._listed()) is None:
            exchange.reply(b'{"error": {"message": "the replicas are not known yet"}}', status=503)
        else:
            exchange.reply(msgspec.json.encode([_row(row) for row in rows]))


def _row(row: BackendConfig) -> dict[str, object]:
    """Without what is at its default."""
    defaults = BackendConfig(url="")
    shown = {name: getattr(row, name) for name in row.__struct_fields__}
    return {name: value for name, value in shown.items() if value != getattr(defaults, name)}
