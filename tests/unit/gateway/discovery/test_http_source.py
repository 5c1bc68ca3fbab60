"""`HttpSource`: lists that a real server gives, and what becomes of answers that are none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tonle.config.discovery import DiscoveryConfig, HttpDiscovery, discovery_sources
from tonle.edge.exchange import Exchange
from tonle.edge.listening import bind, local_url
from tonle.edge.server import HttpServer, ServerLimits
from tonle.gateway.discovery.http_source import HttpSource
from tonle.gateway.discovery.source import SourceLost
from tonle.gateway.discovery.sources import source_of


class Lister:
    def __init__(self) -> None:
        self.status, self.body = 200, b"[]"
        self.paths: list[str] = []

    async def __call__(self, exchange: Exchange) -> None:
        self.paths.append(exchange.path + (f"?{exchange.query}" if exchange.query else ""))
        exchange.reply(self.body, status=self.status)


def run(main: Callable[[Lister, str], Awaitable[None]]) -> None:
    async def whole() -> None:
        lister = Lister()
        server = HttpServer(lister, ServerLimits())
        listener = bind("127.0.0.1", 0)
        await server.start(listener)
        try:
            async with asyncio.timeout(120):
                await main(lister, f"{local_url(*listener.getsockname()[:2])}/backends")
        finally:
            await server.stop(drain_s=0)

    asyncio.run(whole())


def source(url: str, **fields: Any) -> HttpSource:
    return HttpSource(HttpDiscovery(url=url, interval_s=0.01, **fields))


def test_a_list_is_told_and_told_again_when_it_changes() -> None:
    async def main(lister: Lister, url: str) -> None:
        lister.body = json.dumps([{"url": "http://10.0.0.1:8000", "name": "a"}]).encode()
        watched = source(url, backend={"api_key": "secret"}).watch()
        (row,) = await anext(watched)
        assert (row.name, row.url, row.api_key) == ("a", "http://10.0.0.1:8000", "secret")
        lister.body = b"[]"
        assert await anext(watched) == ()
        assert set(lister.paths) == {"/backends"}

    run(main)


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (503, b"[]", "it answers 503"),
        (200, b'[{"name": "a"}]', "lacks 'url'"),
        (200, b"", "it is empty"),
        (200, b"{}", "must be a list of backends"),
        (200, b'[{"url": "http://evil", "api_key_env": "AWS_SECRET_ACCESS_KEY"}]', "may not name a variable"),
    ],
)
def test_what_is_no_list_says_so_and_removes_nothing(status: int, body: bytes, why: str) -> None:
    async def main(lister: Lister, url: str) -> None:
        lister.status, lister.body = status, body
        with pytest.raises(SourceLost, match=why):
            await anext(source(url).watch())

    run(main)


@pytest.mark.parametrize(("place", "asked"), [("", "/"), ("/lists/v1", "/lists/v1"), ("/all?of=blue", "/all?of=blue")])
def test_the_very_url_is_asked(place: str, asked: str) -> None:
    async def main(lister: Lister, url: str) -> None:
        await anext(source(url.removesuffix("/backends") + place).watch())
        assert lister.paths == [asked]

    run(main)


def test_nobody_there() -> None:
    async def main(_: Lister, __: str) -> None:
        with pytest.raises(SourceLost):
            await anext(source("http://127.0.0.1:1/backends").watch())

    run(main)


def test_the_flag() -> None:
    (wanted,) = discovery_sources().read("http://head:8365/backends")
    assert wanted == DiscoveryConfig(http=HttpDiscovery(url="http://head:8365/backends"))
    assert source_of(wanted).name == "http://head:8365/backends"
    with pytest.raises(ValueError, match="must not set url"):
        discovery_sources().read({"http": {"url": "http://h", "backend": {"url": "http://x"}}})
