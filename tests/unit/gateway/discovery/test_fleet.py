"""`Fleet`: lists that are too long or have odd entries, and what it says of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from tonle.config.gateway import GatewayConfig
from tonle.config.routing import BackendConfig
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.discovery.fleet import MAX_BACKENDS, Fleet
from tonle.gateway.discovery.source import SourceLost


def reconciled(*lists: Sequence[BackendConfig]) -> list[str]:
    """The names of the backends after these lists of one source, one after the other."""

    async def main() -> list[str]:
        pool = BackendPool([], probe_interval_s=0)
        fleet = Fleet(pool, GatewayConfig(probe_interval_s=0.0))
        for rows in lists:
            fleet.reconcile("file list", rows)
        return [backend.name for backend in pool.backends]

    return asyncio.run(main())


def row(url: str, name: str | None = None, **fields: str) -> BackendConfig:
    return BackendConfig(url=url, name=name, kind="openai", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["http://[::1:8000", "http://a:port", "http://user:sk-secret@host:1", "nonsense"])
def test_an_entry_that_cannot_be_used_is_left_out_alone_and_named_without_passwords(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert reconciled([row(url), row("http://b:1", "b")]) == ["b"]
    assert "is left out" in caplog.text and "sk-secret" not in caplog.text


def test_a_list_that_is_too_long_changes_nothing() -> None:
    rows = [row(f"http://h:{number}", f"b{number}") for number in range(MAX_BACKENDS + 1)]
    with pytest.raises(SourceLost, match=f"{MAX_BACKENDS + 1} backends"):
        reconciled(rows)
    assert len(reconciled(rows[:10], [])) == 10  # they leave, which takes a moment
