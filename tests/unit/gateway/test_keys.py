"""Keys: made, hashed, kept, found, revoked."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from tonle.errors import ConfigError, NotFound
from tonle.gateway.api_keys.key import KeyLimits, digest_of, draw, given
from tonle.gateway.api_keys.ring import KeyRing
from tonle.gateway.api_keys.sqlite_keys import SqliteKeys


def test_a_secret_is_long_and_never_kept(tmp_path: Path) -> None:
    key, secret = draw("alice")
    assert len(secret) > 40 and secret.startswith("tonle-")
    assert key.digest == digest_of(secret)
    asyncio.run(SqliteKeys(tmp_path / "db").add(key))
    assert all(secret.encode() not in path.read_bytes() for path in tmp_path.iterdir())
    assert stat.S_IMODE((tmp_path / "db").stat().st_mode) == 0o600


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        key, _ = draw("bob", scopes=("models", "admin"), models=("m",), limits=KeyLimits(tokens_per_day=5), tenant="t")
        await SqliteKeys(tmp_path / "db").add(key)
        assert await SqliteKeys(tmp_path / "db").all() == [key]

    asyncio.run(main())


def test_a_ring_finds_only_valid_keys(tmp_path: Path) -> None:
    async def main() -> None:
        store = SqliteKeys(tmp_path / "db")
        ring = KeyRing([given("fixed", admin=False)], store)
        key, secret = draw("carol")
        await ring.add(key)
        assert ring.find(secret) == key
        assert ring.find("fixed") is not None
        assert ring.find("other") is None
        await ring.revoke(key.id)
        assert ring.find(secret) is None
        with pytest.raises(NotFound, match="tonle keys list"):
            await ring.revoke("key-none")
        await store.close()

    asyncio.run(main())


def test_revoking_the_last_key_opens_no_door(tmp_path: Path) -> None:
    async def main() -> None:
        ring = KeyRing(store=SqliteKeys(tmp_path / "db"))
        assert ring.empty
        key, _ = draw("erin")
        await ring.add(key)
        await ring.revoke(key.id)
        assert not ring.empty
        again = KeyRing(store=SqliteKeys(tmp_path / "db"))
        await again.reload()
        assert not again.empty

    asyncio.run(main())


def test_a_ring_follows_what_another_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.gateway.api_keys.ring.FOLLOW_S", 0.01)

    async def main() -> None:
        ring = KeyRing(store=SqliteKeys(tmp_path / "db"))
        ring.start()
        key, secret = draw("dave")
        await SqliteKeys(tmp_path / "db").add(key)
        for _ in range(12_000):
            if ring.find(secret) is not None:
                break
            await asyncio.sleep(0.01)
        assert ring.find(secret) == key
        ring.stop()

    asyncio.run(main())


def test_a_key_of_the_settings_keeps_its_id() -> None:
    assert given("secret", admin=True).id == given("secret", admin=True).id
    assert given("secret", admin=True).may("admin") and not given("secret", admin=False).may("admin")


def test_usage_adds_up(tmp_path: Path) -> None:
    async def main() -> None:
        store = SqliteKeys(tmp_path / "db")
        await store.add_usage("2026-01-01", {"a": 3})
        await store.add_usage("2026-01-01", {"a": 4, "b": 1})
        assert await store.usage("2026-01-01") == {"a": 7, "b": 1}
        assert await store.usage("2026-01-02") == {}
        assert await store.secret("salt") == await SqliteKeys(tmp_path / "db").secret("salt")

    asyncio.run(main())


def test_usage_that_is_added_at_once_adds_up(tmp_path: Path) -> None:
    async def main() -> None:
        store = SqliteKeys(tmp_path / "db")
        for _ in range(100):
            await asyncio.gather(*(store.add_usage("2026-01-01", {"a": 1, "b": 1}) for _ in range(8)))
        assert await store.usage("2026-01-01") == {"a": 800, "b": 800}

    asyncio.run(main())


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="file"):
        SqliteKeys(tmp_path / "file" / "db")
