"""The secret behind the salts of cached prefixes, where stored KV blocks must be found again after a restart or by other servers.

Does: keep it beside the blocks, for those who may read them anyway. Does not: matter to servers that store none, whose secret is
drawn at each start; or to those with `state_db`, which has one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path

from tonle.config.serve import ServeConfig
from tonle.config.stores import place_of
from tonle.errors import ConfigError

log = logging.getLogger("tonle.replica")

_FILE = "salt.secret"
_KEY = "tonle:kv:salt"
_TIMEOUT_S = 2.0


def kept_salt_secret(settings: ServeConfig) -> str | None:
    """None: none is kept. Servers that share a Redis share its secret, others that share a folder the folder's."""
    if settings.kv_offload_redis is not None:
        return _in_redis(settings.kv_offload_redis)
    if settings.kv_offload_dir is not None:
        return _in_folder(Path(settings.kv_offload_dir).expanduser())
    return None


def _in_folder(folder: Path) -> str:
    """Raises `ConfigError`."""
    path = folder / _FILE
    mine = path.with_name(f"{_FILE}.{os.getpid()}.part")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with os.fdopen(os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # another server was faster
                os.link(mine, path)
            mine.unlink()
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"kv_offload_dir: cannot use {path}: {error.strerror}", param="kv_offload_dir") from None


def _in_redis(url: str) -> str | None:
    try:
        import redis
    except ImportError:
        raise ConfigError(
            "kv_offload_redis needs the package redis: pip install 'tonle[redis]'", param="kv_offload_redis"
        ) from None
    try:
        with redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S) as client:
            client.set(_KEY, secrets.token_hex(32), nx=True)
            found = client.get(_KEY)
    except (redis.RedisError, OSError) as error:
        log.warning("%s cannot be reached: until the next start, KV blocks there are only this server's (%s)",
                    place_of(url), error)  # fmt: skip
        return None
    return found.decode() if isinstance(found, bytes) else None
