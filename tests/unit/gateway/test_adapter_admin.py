"""Removing an adapter from the engine of this process: what other requests see meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from tonle.config.gateway import GatewayConfig
from tonle.config.routing import BackendConfig
from tonle.edge.client import Sink
from tonle.edge.exchange import Exchange
from tonle.gateway.adapters import AdapterAdmin
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.under_way import UnderWay
from tonle.protocol.replies import ModelEntry

MODELS = {"base": ModelEntry(id="base"), "khmer": ModelEntry(id="khmer", parent="base")}


class Caller:
    def __init__(self, name: str) -> None:
        self.body = msgspec.json.encode({"lora_name": name})
        self.status = 0

    def reply(self, body: bytes, *, status: int, **more: Any) -> None:
        self.status = status


class Engine:
    """Replies 404, and looks which models requests could use while it was asked."""

    def __init__(self) -> None:
        row = BackendConfig(url="local:", name="local", models=tuple(MODELS), kind="tonle")
        self.pool = BackendPool([Backend(row, GatewayConfig(), self, lambda: MODELS)], probe_interval_s=0)
        self.usable: list[set[str]] = []

    async def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str], sink: Sink, *, first_s: float,
        silence_s: float,
    ) -> None:  # fmt: skip
        self.usable.append({name for name in MODELS if self.pool.entry(name) is not None})
        sink.head(404, {})
        sink.data(b"{}")

    def close(self) -> None: ...


@pytest.mark.parametrize(("name", "usable"), [("khmer", {"base"}), ("base", set(MODELS)), ("other", set(MODELS))])
def test_only_an_adapter_is_withdrawn_while_it_is_removed(name: str, usable: set[str]) -> None:
    engine, caller = Engine(), Caller(name)
    admin = AdapterAdmin(engine.pool, UnderWay(), {}, strict=False)
    asyncio.run(admin.unload(cast(Exchange, caller)))
    assert engine.usable == [usable] and caller.status == 404
    assert engine.pool.withdrawn == set()
