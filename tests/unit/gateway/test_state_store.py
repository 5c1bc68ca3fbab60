"""Which place a setting names, what must be installed for it, and that passwords stay out of messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tonle.config.gateway import SETTINGS, GatewayConfig
from tonle.config.load_settings import load_gateway
from tonle.config.stores import place_of
from tonle.errors import ConfigError
from tonle.gateway.gateway import Gateway
from tonle.gateway.state_store import state_of


@pytest.mark.parametrize(
    ("package", "place", "extra"),
    [("redis.asyncio", "redis://u:pw@h/0", "redis"), ("asyncpg", "postgresql://u:pw@h/d", "postgres")],
)
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, package: str, place: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'tonle\[{extra}\]'") as refused:
        state_of(place, timeout_s=1)
    assert "pw" not in refused.value.message and refused.value.param == "state_db"


def test_the_same_for_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    settings = {"backends": ["http://127.0.0.1:1"], "state_db": str(tmp_path / "db"), "cache": "redis://h"}
    with pytest.raises(ConfigError, match=r"cache=redis://h needs .* pip install 'tonle\[redis\]'"):
        Gateway(load_gateway(settings, environ={}))


def test_nothing_is_loaded_that_is_not_chosen() -> None:
    code = "import sys, tonle.gateway.gateway; sys.exit(bool({'torch', 'redis', 'asyncpg'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("written", "read"),
    [("memory", "memory"), (True, "memory"), ("on", "memory"), (False, None), ("off", None), (None, None),
     ("redis://h:1/2", "redis://h:1/2"), ("rediss://h", "rediss://h")],
)  # fmt: skip
def test_where_answers_are_kept(written: object, read: str | None) -> None:
    assert SETTINGS["cache"].type.read(written) == read


@pytest.mark.parametrize("place", ["mysql://u:pw@h/d", "http://h", ""])
def test_a_place_nobody_knows_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match="must be") as refused:
        SETTINGS["state_db"].type.read(place)
    assert "pw" not in str(refused.value)


def test_a_file_may_be_called_anything() -> None:
    assert SETTINGS["state_db"].type.read("/var/lib/tonle/redis.db") == "/var/lib/tonle/redis.db"


@pytest.mark.parametrize("name", ["state_lease_s", "store_timeout_s"])
def test_no_time_at_all_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="more than 0"):
        GatewayConfig(**{name: 0.0}).validate()


def test_a_place_is_shown_without_its_password() -> None:
    assert (
        place_of("postgresql://user:p%40ss@db.example:5432/tonle?sslmode=require")
        == "postgresql://db.example:5432/tonle"
    )
    assert place_of("redis://:secret@10.0.0.1:6379/0") == "redis://10.0.0.1:6379/0"
