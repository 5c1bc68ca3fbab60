"""The secret behind salts is kept beside stored KV blocks, so that the same caller finds them after a restart."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.stores import redis_store
from tonle.config.serve import ServeConfig
from tonle.errors import ConfigError
from tonle.replica.salt_secret import kept_salt_secret


def test_none_is_kept_where_no_blocks_are() -> None:
    assert kept_salt_secret(replace(ServeConfig(), kv_offload_memory_bytes=2**20)) is None


def test_a_folder_has_one_that_stays(tmp_path: Path) -> None:
    settings = replace(ServeConfig(), kv_offload_dir=str(tmp_path / "blocks"))
    secret = kept_salt_secret(settings)
    assert secret is not None and len(secret) == 64
    assert kept_salt_secret(settings) == secret
    (file,) = (tmp_path / "blocks").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.read_text() == secret
    assert kept_salt_secret(replace(settings, kv_offload_dir=str(tmp_path / "others"))) != secret


def test_servers_that_share_a_redis_share_its_secret(tmp_path: Path) -> None:
    with redis_store(tmp_path / "redis") as store:
        settings = replace(ServeConfig(), kv_offload_redis=store.url)
        secret = kept_salt_secret(settings)
        assert secret is not None and kept_salt_secret(replace(settings, kv_offload_dir=str(tmp_path))) == secret


def test_what_cannot_be_kept_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_offload_dir"):
        kept_salt_secret(replace(ServeConfig(), kv_offload_dir=str(tmp_path / "file" / "blocks")))
    assert kept_salt_secret(replace(ServeConfig(), kv_offload_redis="redis://127.0.0.1:9/0")) is None
    assert "cannot be reached" in caplog.text
