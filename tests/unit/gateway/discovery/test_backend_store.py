"""Backends in the file of a gateway's state."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from tonle.config.routing import BackendConfig
from tonle.gateway.api_keys.sqlite_keys import SqliteKeys


def test_rows_are_kept_replaced_and_deleted_and_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    async def main() -> None:
        store = SqliteKeys(tmp_path / "state.db")
        one = BackendConfig(url="http://b:1", name="one", models=("m",), api_key="secret")
        for row in (one, BackendConfig(url="http://a:1"), BackendConfig(url="http://b:1", name="one", weight=2)):
            await store.put_backend(row)
        assert [(row.name, row.weight) for row in await store.all_backends()] == [(None, 1.0), ("one", 2.0)]
        with sqlite3.connect(tmp_path / "state.db") as db:
            db.execute("INSERT INTO backends VALUES ('new', ?)", (b'{"url": "http://c", "unheard_of": 1}',))
        assert len(await store.all_backends()) == 2
        await store.delete_backend("a:1")
        await store.delete_backend("never")
        assert [row.name for row in await store.all_backends()] == ["one"]
        await store.close()

    asyncio.run(main())
