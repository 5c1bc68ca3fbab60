"""`RedisClient`: a connection pool to one Redis, bounded in time and connections. The library is imported when needed.

Does: connect, say what to install, keep passwords out of messages, turn every failure of a call into `StoreLost`.
Does not: know what is stored there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from tonle.config.stores import place_of
from tonle.errors import ConfigError, StoreLost

MAX_CONNECTIONS = 16  # a call takes well under a millisecond; more would only wait inside Redis


class RedisClient:
    """Owns the connections to one Redis. Made on the event loop that uses it."""

    def __init__(self, url: str, *, timeout_s: float, param: str) -> None:
        """`param` is the setting that names the URL. Raises `ConfigError`."""
        self.place = place_of(url)
        self._timeout_s = timeout_s
        self.redis: Any = _connect(url, timeout_s, param)

    @contextlib.asynccontextmanager
    async def trip(self) -> AsyncIterator[Any]:
        """For calls inside: any failure, or `timeout_s` without an answer, is raised as `StoreLost`."""
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(self._timeout_s):
                yield self.redis
        except TimeoutError:
            raise StoreLost(f"{self.place} did not answer within {self._timeout_s:g} s") from None
        except (RedisError, OSError) as error:
            raise StoreLost(f"{self.place}: {str(error) or type(error).__name__}") from error

    async def close(self) -> None:
        # A Redis that hangs must not keep this process from ending.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._timeout_s):
                await self.redis.aclose()


def _connect(url: str, timeout_s: float, param: str) -> Any:
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ConfigError(
            f"{param}={place_of(url)} needs the Python package redis: pip install 'tonle[redis]'", param=param
        ) from None
    options: dict[str, Any] = {
        "max_connections": MAX_CONNECTIONS,
        "timeout": timeout_s,  # for a free connection
        "socket_connect_timeout": timeout_s,
        # A pooled connection may have been closed since its last use: retry once, on a new one. Every command must
        # therefore be safe to send twice.
        "retry": Retry(NoBackoff(), 1),
    }
    try:
        return Redis(connection_pool=BlockingConnectionPool.from_url(url, **options))
    except ValueError as error:
        raise ConfigError(f"{param}={place_of(url)} cannot be used: {error}", param=param) from None
